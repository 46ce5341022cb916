// npm etcd3: keys, ranges, transactions, namespaces, software transactions, refusals.
'use strict';

const { Etcd3 } = require('etcd3');
const { run } = require('../shared/report');

async function open(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  report.base = Number((await client.get('none').exec()).header.revision);
  return client;
}

async function putGetDelete(report) {
  const client = await open(report);
  const a = report.key('a');
  report.step('missing', await client.get(a).string());
  report.step('put', report.rev((await client.put(a).value('1')).header.revision));
  const put = await client.put(a).value('2').getPrevious();
  report.step('previous', put.value.toString());
  const { kvs } = await client.get(a).exec();
  report.step('get', kvs.map((kv) => [kv.value.toString(), report.rev(kv.create_revision), report.rev(kv.mod_revision), kv.version]));
  report.step('number', await client.get(a).number(), await client.get(a).exists());
  report.step('old', await client.get(a).revision(report.base + 1).string());
  report.step('touch', report.rev((await client.put(a).touch()).header.revision), await client.get(a).string());
  report.step('delete', (await client.delete().key(a)).deleted, await client.get(a).string());
  client.close();
}

async function ranges(report) {
  const client = await open(report);
  for (const [number, name] of ['b', 'a', 'c', 'd'].entries()) {
    await client.put(report.key(name)).value(number);
  }
  const all = () => client.getAll().prefix(report.prefix);
  const names = (keys) => keys.map((key) => report.name(key));
  report.step('prefix', names(await all().keys()));
  for (const target of ['Key', 'Create', 'Mod', 'Value']) {
    report.step(target, names(await all().sort(target, 'Descend').limit(3).keys()));
  }
  report.step('count', await all().count());
  const { kvs } = await client.getAll().inRange({ start: report.key('b'), end: report.key('d') }).exec();
  report.step('range', names(kvs.map((kv) => kv.key)));
  report.step('created since', names(await all().minCreateRevision(report.base + 3).keys()));
  report.step('delete', (await client.delete().prefix(report.prefix)).deleted);
  client.close();
}

async function txn(report) {
  const client = await open(report);
  const [a, b] = [report.key('a'), report.key('b')];
  await client.put(a).value('1');
  const won = await client
    .if(a, 'Value', '==', '1')
    .and(a, 'Version', '>', 0)
    .and(b, 'Create', '==', 0)
    .then(client.put(b).value('2'), client.get(b), client.delete().key(a))
    .else(client.put(a).value('never'))
    .commit();
  report.step('then', won.succeeded, report.rev(won.header.revision), won.responses.map((one) => one.response));
  const lost = await client.if(a, 'Version', '>', 0).then().else(client.get(a), client.get(b)).commit();
  report.step('else', lost.succeeded, lost.responses.map((one) => one.response_range.kvs.map((kv) => kv.value.toString())));
  await report.fails('twice', () => client.if(b, 'Version', '>', 0).then(client.put(a).value('1'), client.put(a).value('2')).commit());
  client.close();
}

async function namespaces(report) {
  const client = await open(report);
  const inner = client.namespace(report.key('inner/'));
  await inner.put('a').value('1');
  report.step('inside', await inner.getAll().strings());
  report.step('outside', (await client.getAll().prefix(report.prefix).keys()).map((key) => report.name(key)));
  await inner.delete().all();
  report.step('deleted', await inner.getAll().count());
  client.close();
}

// Ten transactions at once add to one number; each retries until nobody was in between.
async function softwareTransactions(report) {
  const client = await open(report);
  const key = report.key('number');
  await client.put(key).value(0);
  const add = () =>
    client.stm({ retries: 100 }).transact((tx) => tx.get(key).number().then((value) => tx.put(key).value(value + 1)));
  await Promise.all(Array.from({ length: 10 }, add));
  report.step('number', await client.get(key).number());
  client.close();
}

async function refusals(report) {
  const client = await open(report);
  const a = report.key('a');
  await report.fails('empty key', () => client.put('').value('1'));
  await report.fails('too large', () => client.put(a).value(Buffer.alloc(1_800_000)));
  await report.fails('no such lease', () => client.put(a).value('1').lease('4711'));
  for (const value of ['1', '2', '3']) {
    await client.put(a).value(value);
  }
  await client.kv.compact({ revision: String(report.base + 2) });
  await report.fails('compacted', () => client.get(a).revision(report.base + 1).string());
  await report.fails('future', () => client.get(a).revision(report.base + 1000).string());
  report.step('get', await client.get(a).string());
  client.close();
}

async function admin(report) {
  const client = await open(report);
  const status = await client.maintenance.status();
  report.step('status', status.version.split('.').length, Number(status.raftTerm) > 0, Number(status.dbSize) > 0);
  const { members } = await client.cluster.memberList({});
  const urls = members.flatMap((member) => member.clientURLs).sort();
  report.step('members', urls.join() === report.endpoints.map((endpoint) => `http://${endpoint}`).sort().join());
  report.step('alarms', (await client.maintenance.alarm({ action: 'Get', memberID: '0', alarm: 'None' })).alarms);
  client.close();
}

// Logging in where there are no users fails, and another client is not hurt.
async function users(report) {
  const client = new Etcd3({ hosts: report.endpoints, auth: { username: 'root', password: 'secret' } });
  try {
    await client.get(report.key('a')).string();
    report.step('logged in');
  } catch (error) {
    report.step('refused', error instanceof Error);
  }
  client.close();
  report.step('without', await (await open(report)).get(report.key('a')).string());
}

run(putGetDelete, ranges, txn, namespaces, softwareTransactions, refusals, admin, users);
