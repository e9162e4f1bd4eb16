// nsqjs in a process of its own. What the JSON argument means and what is printed: task.py.
'use strict'

const nsq = require('nsqjs')

const task = JSON.parse(process.argv[2])

function say (event, fields) {
  process.stdout.write(JSON.stringify({ event, ...fields }) + '\n')
}

function fail (error) {
  say('failed', { error: String(error) })
  process.exit(1)
}

function publish () {
  const [host, port] = task.nsqd[0].split(':')
  const writer = new nsq.Writer(host, Number(port), { heartbeatInterval: task.heartbeat_s })
  const steps = [
    ...task.single.map(body => done => writer.publish(task.topic, body, done)),
    ...(task.batch.length ? [done => writer.publish(task.topic, task.batch, done)] : []),
    // deferPublish throws on a message that is not in a list, whatever its documentation says
    ...task.deferred.map(body => done => writer.deferPublish(task.topic, [body], task.defer_ms, done))
  ]
  const next = () => {
    const step = steps.shift()
    if (!step) return writer.close()
    step(error => {
      say('published', { ok: !error, answer: String(error || 'OK') })
      next()
    })
  }
  writer.on('ready', next)
  writer.on('error', fail)
  writer.on('closed', () => process.exit(0))
  writer.connect()
}

function consume () {
  const reader = new nsq.Reader(task.topic, task.channel, {
    nsqdTCPAddresses: task.nsqd,
    lookupdHTTPAddresses: task.nsqlookupd,
    lookupdPollInterval: 1,
    maxInFlight: task.max_in_flight,
    heartbeatInterval: task.heartbeat_s
  })
  let finished = 0
  const finish = message => {
    message.finish()
    finished += 1
    if (finished === task.finish_count) {
      setTimeout(() => { // respond() writes on the next tick, and there is no graceful end
        reader.close()
        say('closed')
        setTimeout(() => process.exit(0), 50)
      }, 50)
    }
  }
  reader.on('message', message => {
    const body = message.body.toString()
    say('message', { body, attempts: message.attempts })
    if (body.startsWith('requeue') && message.attempts === 1) {
      message.requeue(task.requeue_ms, false)
    } else if (body.startsWith('slow')) {
      const touchCount = Math.floor(task.slow_s / task.touch_s)
      let touched = 0
      const timer = setInterval(() => {
        message.touch()
        touched += 1
        if (touched === touchCount) {
          clearInterval(timer)
          finish(message)
        }
      }, task.touch_s * 1000)
    } else if (!body.startsWith('hold')) {
      finish(message)
    }
  })
  reader.on('error', fail)
  reader.connect()
  say('started')
}

if (task.role === 'publish') publish()
else consume()
