// What a scenario under Node.js says to the test that started it; the same lines as report.py, which see.
'use strict';

const readline = require('readline');

const [endpoints, prefix] = process.argv.slice(-2);
const WAIT_MS = 15_000;
const answers = [];
const waiting = [];

function send(message) {
  process.stdout.write(JSON.stringify(message) + '\n');
}

class Report {
  constructor(scenario) {
    this.scenario = scenario;
    this.endpoints = endpoints.split(',');
    this.prefix = `${prefix}/${scenario}/`;
    this.base = 0;
  }

  key(name) {
    return this.prefix + name;
  }

  name(key) {
    return key.toString().replace(this.prefix, '');
  }

  // A revision counted from the store's revision when the scenario began; npm etcd3 gives them as strings.
  rev(revision) {
    return Number(revision) - this.base;
  }

  step(...values) {
    send({ scenario: this.scenario, step: values });
  }

  async fails(what, call) {
    try {
      this.step(what, { returned: String(await call()) });
    } catch (error) {
      this.step(what, { error: [error.constructor.name, error.message] });
    }
  }

  async order(action, member) {
    send({ order: action, member });
    await new Promise((resolve) => (answers.length ? (answers.shift(), resolve()) : waiting.push(resolve)));
  }
}

// Reject after WAIT_MS, so that a scenario that waits in vain fails by name instead of hanging.
function within(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited in vain for ${what}`)), WAIT_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// Things that arrive one by one, taken in order.
class Inbox {
  constructor() {
    this.items = [];
    this.wake = () => undefined;
  }

  put(item) {
    this.items.push(item);
    this.wake();
  }

  async take(count, what = 'events') {
    const enough = async () => {
      while (this.items.length < count) {
        await new Promise((resolve) => (this.wake = resolve));
      }
    };
    await within(enough(), `${count} ${what}, have ${this.items.length}`);
    return this.items.splice(0, count);
  }
}

async function run(...scenarios) {
  const lines = readline.createInterface({ input: process.stdin });
  lines.on('line', () => (waiting.length ? waiting.shift()() : answers.push(true)));
  for (const scenario of scenarios) {
    const report = new Report(scenario.name);
    try {
      await scenario(report);
    } catch (error) {
      report.step('RAISED', error.constructor.name, error.message);
      console.error(error);
    }
  }
  send({ end: true });
  process.stdout.write('', () => process.exit(0));
}

module.exports = { Inbox, run, within };
