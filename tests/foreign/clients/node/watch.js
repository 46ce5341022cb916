// npm etcd3: watches, replay, previous values, filters, cancel, compaction, many events.
'use strict';

const { Etcd3 } = require('etcd3');
const { Inbox, run } = require('../shared/report');

async function open(report, hosts = report.endpoints) {
  const client = new Etcd3({ hosts });
  report.base = Number((await client.get('none').exec()).header.revision);
  return client;
}

// Keep every event of a watcher, one by one, described.
function collect(report, watcher) {
  const inbox = new Inbox();
  watcher.on('data', (response) => {
    for (const { type, kv, prev_kv: previous } of response.events) {
      const fields = [type, report.name(kv.key), kv.value.toString(), report.rev(kv.mod_revision), Number(kv.version)];
      inbox.put([...fields, previous ? previous.value.toString() : null]);
    }
  });
  return inbox;
}

async function oneKey(report) {
  const client = await open(report);
  const a = report.key('a');
  const watcher = await client.watch().key(a).create();
  const inbox = collect(report, watcher);
  await client.put(a).value('1');
  await client.put(report.key('ab')).value('not watched');
  await client.put(a).value('2');
  await client.delete().key(a);
  report.step('events', await inbox.take(3));
  await watcher.cancel();
  await client.put(a).value('3');
  report.step('after cancel', inbox.items.length);
  client.close();
}

async function prefixAndTxn(report) {
  const client = await open(report);
  const watcher = await client.watch().prefix(report.prefix).withPreviousKV().create();
  const responses = new Inbox();
  watcher.on('data', (response) => responses.put(response.events.map((event) => [event.type, report.rev(event.kv.mod_revision)])));
  const inbox = collect(report, watcher);
  await client.put(report.key('c')).value('0');
  const puts = ['b', 'a', 'd'].map((name) => client.put(report.key(name)).value(name));
  await client.if(report.key('c'), 'Version', '>', 0).then(...puts, client.delete().key(report.key('c'))).commit();
  await client.delete().prefix(report.prefix);
  report.step('events', await inbox.take(8));
  report.step('a revision is one response', await responses.take(3));
  await watcher.cancel();
  client.close();
}

async function fromOldRevision(report) {
  const client = await open(report);
  const a = report.key('a');
  for (const value of ['1', '2', '3']) {
    await client.put(a).value(value);
  }
  await client.delete().key(a);
  const start = String(report.base + 2);
  const everything = collect(report, await client.watch().key(a).startRevision(start).withPreviousKV().create());
  const puts = collect(report, await client.watch().key(a).startRevision(start).only('put').create());
  const deletes = collect(report, await client.watch().key(a).startRevision(start).only('delete').create());
  await client.put(a).value('4');
  await client.delete().key(a);
  report.step('everything', await everything.take(5));
  report.step('puts', await puts.take(3));
  report.step('deletes', await deletes.take(2));
  client.close();
}

// At one member: the client takes a connection for each call, and another member may not have compacted yet.
async function compactedStart(report) {
  const client = await open(report, report.endpoints[0]);
  const a = report.key('a');
  for (const value of ['1', '2', '3', '4']) {
    await client.put(a).value(value);
  }
  await client.kv.compact({ revision: String(report.base + 3) });
  const watcher = client.watch().key(a).startRevision(String(report.base + 1)).watcher();
  const errors = new Inbox();
  watcher.on('error', (error) => errors.put([error.constructor.name, error.message]));
  report.step('lost', await errors.take(1));
  const edge = collect(report, await client.watch().key(a).startRevision(String(report.base + 3)).create());
  report.step('at the edge', await edge.take(2));
  client.close();
}

async function severalOnOneStream(report) {
  const client = await open(report);
  const names = Array.from({ length: 50 }, (_, number) => `k${number}`);
  const watchers = await Promise.all(names.map((name) => client.watch().key(report.key(name)).create()));
  report.step('ids', new Set(watchers.map((watcher) => watcher.id)).size);
  const inboxes = watchers.map((watcher) => collect(report, watcher));
  await Promise.all(watchers.slice(0, 25).map((watcher) => watcher.cancel()));
  for (const name of names) {
    await client.put(report.key(name)).value(name);
  }
  const seen = await Promise.all(inboxes.slice(25).map((inbox) => inbox.take(1)));
  report.step('each its own', seen.every(([event], index) => event[1] === names[index + 25]));
  report.step('the cancelled nothing', inboxes.slice(0, 25).every((inbox) => inbox.items.length === 0));
  client.close();
}

async function many(report) {
  const client = await open(report);
  const inbox = collect(report, await client.watch().prefix(report.prefix).create());
  const write = async (writer) => {
    for (let number = 0; number < 100; number++) {
      await client.put(report.key(String(writer))).value(number);
    }
  };
  await Promise.all(Array.from({ length: 10 }, (_, writer) => write(writer)));
  const events = await inbox.take(1000);
  report.step('in order', events.every((event, index) => event[3] === index + 1));
  const replayed = collect(report, await client.watch().prefix(report.prefix).startRevision(String(report.base + 1)).create());
  report.step('the same again', JSON.stringify(await replayed.take(1000)) === JSON.stringify(events));
  client.close();
}

run(oneKey, prefixAndTxn, fromOldRevision, compactedStart, severalOnOneStream, many);
