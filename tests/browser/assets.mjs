// Makes src/flintmq/nsqadmin/static/vendor from the packages of npm that package-lock.json pins: `npm ci` in this folder,
// then `node tests/browser/assets.mjs`. With --check nothing is written, and what differs is an error.
//
// Tabler is cut down to what the templates and scripts of nsqadmin name; what it has for the dark theme stands there twice,
// the second time for whom the system says so. The rest is copied byte by byte.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import postcss from "postcss";
import { PurgeCSS } from "purgecss";

const here = dirname(fileURLToPath(import.meta.url));
const nsqadmin = join(here, "../../src/flintmq/nsqadmin");
const vendor = join(nsqadmin, "static/vendor");
const packageFile = (...path) => readFileSync(join(here, "node_modules", ...path), "utf-8");
const version = (name) => JSON.parse(packageFile(name, "package.json")).version;

const IS_DARK = /^(:root)?\[data-bs-theme="?dark"?\]/;

function followTheSystem(css) {
  const root = postcss.parse(css);
  const media = postcss.atRule({ name: "media", params: "(prefers-color-scheme:dark)" });
  root.walkRules((rule) => {
    const isInMedia = rule.parent.type === "atrule";
    const dark = rule.selectors.filter((selector) => IS_DARK.test(selector));
    if (!dark.length || isInMedia) return;
    const copy = rule.clone();
    copy.selectors = dark.map((selector) => selector.replace(IS_DARK, ":root:not([data-bs-theme=light])"));
    media.append(copy);
  });
  root.append(media);
  return root.toString();
}

async function tabler() {
  const raw = packageFile("@tabler/core/dist/css/tabler.min.css").replace(/\/\*# sourceMappingURL=.*?\*\//, "");
  const [purged] = await new PurgeCSS().purge({
    content: ["templates/**/*.html", "pages/*.py", "static/*.js"].map((glob) => join(nsqadmin, glob)),
    css: [{ raw }],
    variables: true,
    keyframes: true,
    fontFace: true,
    dynamicAttributes: ["data-bs-theme"],
  });
  const used = postcss.parse(purged.css);
  const isNever = /:(-moz-|-ms-)|::-ms-|\.(rtl|ltr)\b/;
  used.walkRules((rule) => {
    if (rule.selectors.every((selector) => isNever.test(selector))) rule.remove();
  });
  used.walkAtRules((rule) => {
    if (rule.nodes && !rule.nodes.length) rule.remove();
  });
  return followTheSystem(used.toString()).replace(/^(@charset "UTF-8";)?\s*/, "") + "\n";
}

const MIT = `Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.`;
const TABLER_NOTICE = `The MIT License

Copyright 2018-2026 The Tabler Authors, Copyright 2018-2026 codecalm.net Paweł Kuna; it contains parts of Bootstrap,
Copyright 2011-2025 The Bootstrap Authors.

${MIT}`;

const FILES = [
  { file: "tabler.css", package: "@tabler/core", licence: "MIT", text: TABLER_NOTICE, make: tabler },
  { file: "htmx.js", package: "htmx.org", licence: "0BSD", from: "dist/htmx.min.js" },
  { file: "uplot.js", package: "uplot", licence: "MIT", from: "dist/uPlot.iife.min.js" },
  { file: "uplot.css", package: "uplot", licence: "MIT", from: "dist/uPlot.min.css" },
];

const made = {};
const list = [];
const licences = [];
for (const entry of FILES) {
  const text = entry.make ? await entry.make() : packageFile(entry.package, entry.from).replace(/\n\/\/# sourceMappingURL=.*/, "");
  made[entry.file] = text;
  const of = `${entry.package} ${version(entry.package)}`;
  const notice = `${of} (${entry.licence})\n\n${(entry.text ?? packageFile(entry.package, "LICENSE")).trim()}\n`;
  if (!licences.includes(notice)) licences.push(notice);
  const sha256 = createHash("sha256").update(text).digest("hex");
  list.push({ file: entry.file, package: entry.package, version: version(entry.package), licence: entry.licence, sha256 });
}
made["LICENCES.txt"] = licences.join(`\n${"-".repeat(80)}\n\n`);
made["assets.json"] = JSON.stringify(list, null, 2) + "\n";

if (process.argv.includes("--check")) {
  const differs = Object.keys(made).filter((file) => {
    try {
      return readFileSync(join(vendor, file), "utf-8") !== made[file];
    } catch {
      return true;
    }
  });
  if (differs.length) {
    console.error(`static/vendor is not what would be made now: ${differs.join(", ")}; run node tests/browser/assets.mjs`);
    process.exit(1);
  }
} else {
  mkdirSync(vendor, { recursive: true });
  for (const [file, text] of Object.entries(made)) writeFileSync(join(vendor, file), text);
}
