// nsqjs in a process of its own. Which orders it takes and what it prints: task.py.
'use strict'

const { createHash } = require('crypto')
const { readFileSync } = require('fs')
const { createInterface } = require('readline')
const nsq = require('nsqjs')

const SHOWN_BYTES_MAX = 64

const bytes = base64 => Buffer.from(base64, 'base64')
const shown = body =>
  body.length <= SHOWN_BYTES_MAX ? body.toString('latin1') : createHash('md5').update(body).digest('hex')

function options (task) {
  const found = { heartbeatInterval: task.heartbeat_s }
  if (task.sample_rate) found.sampleRate = task.sample_rate
  if (task.msg_timeout_ms) found.messageTimeout = task.msg_timeout_ms
  if (task.codec) found[task.codec] = true
  if (task.secret) found.authSecret = task.secret
  if (task.tls) {
    found.tls = true
    found.tlsVerification = task.tls === 'verified'
    if (task.ca) found.ca = readFileSync(task.ca)
    if (task.cert) Object.assign(found, { cert: readFileSync(task.cert), key: readFileSync(task.key) })
  }
  return found
}

class Run {
  constructor (number, task) {
    this.number = number
    this.task = task
    this.isOver = false
  }

  say (event, fields) {
    if (!this.isOver) process.stdout.write(JSON.stringify({ run: this.number, event, ...fields }) + '\n')
    this.isOver = this.isOver || event === 'ended' || event === 'failed'
  }
}

class Publisher {
  constructor (run) {
    const [host, port] = run.task.nsqd[0].split(':')
    this.run = run
    this.steps = []
    this.isBusy = false
    this.writer = new nsq.Writer(host, Number(port), options(run.task))
    this.writer.on('ready', () => run.say('ready'))
    this.writer.on('error', error => run.say('error', { error: String(error) }))
    this.writer.connect()
  }

  obey (order) {
    const { topic } = this.run.task
    switch (order.order) {
      case 'publish':
        order.single.forEach(body => this.steps.push(done => this.writer.publish(topic, bytes(body), done)))
        if (order.batch.length) this.steps.push(done => this.writer.publish(topic, order.batch.map(bytes), done))
        // deferPublish throws on a message that is not in a list, whatever its documentation says
        order.deferred.forEach(body =>
          this.steps.push(done => this.writer.deferPublish(topic, [bytes(body)], order.defer_ms, done)))
        break
      case 'end':
        this.steps.push(() => {
          if (this.writer.conn.conn) this.writer.close() // throws when the connection is gone
          this.run.say('ended')
        })
    }
    if (!this.isBusy) this.next()
  }

  next () {
    const step = this.steps.shift()
    this.isBusy = Boolean(step)
    if (!step) return
    step(error => {
      this.run.say('published', { ok: !error, answer: String(error || 'OK') })
      this.next()
    })
  }
}

class Consumer {
  constructor (run) {
    const task = run.task
    this.run = run
    this.seen = new Set()
    this.held = []
    this.finishedCount = 0
    this.reader = new nsq.Reader(task.topic, task.channel, {
      nsqdTCPAddresses: task.nsqd,
      lookupdHTTPAddresses: task.nsqlookupd,
      lookupdPollInterval: 1,
      maxInFlight: task.max_in_flight,
      ...(task.max_backoff_s ? { maxBackoffDuration: task.max_backoff_s } : {}),
      ...options(task)
    })
    this.reader.on('message', message => this.handle(message))
    this.reader.on('error', error => run.say('error', { error: String(error) }))
    this.reader.connect()
    run.say('ready')
  }

  handle (message) {
    const { task } = this.run
    const body = shown(message.body)
    this.run.say('message', { body, attempts: message.attempts })
    const isFirst = !this.seen.has(body)
    this.seen.add(body)
    if (isFirst && /^(requeue|fail)/.test(body)) message.requeue(task.requeue_ms, body.startsWith('fail'))
    else if (isFirst && body.startsWith('hold')) this.held.push(message)
    else if (body.startsWith('slow')) this.touchLater(message, task.touch_count)
    else this.finish(message)
  }

  touchLater (message, count) {
    setTimeout(() => {
      if (!count) return this.finish(message)
      message.touch()
      this.touchLater(message, count - 1)
    }, this.run.task.touch_s * 1000)
  }

  finish (message) {
    message.finish()
    this.finishedCount += 1
    if (this.finishedCount === this.run.task.finish_count) this.end()
  }

  obey (order) {
    switch (order.order) {
      case 'release':
        this.held.splice(0).forEach(message => this.finish(message))
        break
      case 'max_in_flight': // it can be paused, and that is all
        order.value ? this.reader.unpause() : this.reader.pause()
        break
      case 'end':
        this.end()
    }
  }

  end () {
    setTimeout(() => { // answers are written on the next tick, and there is no graceful end
      this.reader.close()
      this.run.say('closed')
      this.run.say('ended')
    }, 50)
  }
}

const doers = new Map()
createInterface({ input: process.stdin }).on('line', line => {
  const order = JSON.parse(line)
  if (order.order !== 'start') return doers.get(order.run).obey(order)
  const run = new Run(order.run, order.task)
  try {
    doers.set(order.run, order.task.role === 'publish' ? new Publisher(run) : new Consumer(run))
  } catch (error) {
    run.say('failed', { error: String(error) })
  }
}).on('close', () => process.exit(0))
