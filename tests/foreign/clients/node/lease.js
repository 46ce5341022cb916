// npm etcd3: leases that are kept alive by themselves, lost, revoked, expired.
'use strict';

const { Etcd3 } = require('etcd3');
const { Inbox, run, within } = require('../shared/report');

async function open(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  report.base = Number((await client.get('none').exec()).header.revision);
  return client;
}

async function life(report) {
  const client = await open(report);
  const lease = client.lease(60, { autoKeepAlive: false });
  const id = await lease.grant();
  await lease.put(report.key('b')).value('1');
  await lease.put(report.key('a')).value('2');
  const answer = await client.leaseClient.leaseTimeToLive({ ID: id, keys: true });
  report.step('ttl', answer.grantedTTL, Number(answer.TTL) > 50, answer.keys.map((key) => report.name(key)).sort());
  report.step('keep-alive', (await lease.keepaliveOnce()).TTL);
  const { leases } = await client.leaseClient.leaseLeases();
  report.step('listed', leases.some((one) => one.ID === id));
  const watcher = await client.watch().prefix(report.prefix).create();
  const inbox = new Inbox();
  watcher.on('delete', (kv) => inbox.put([report.name(kv.key), report.rev(kv.mod_revision)]));
  await lease.revoke();
  report.step('deleted in one revision', await inbox.take(2));
  report.step('gone', await client.getAll().prefix(report.prefix).count());
  const after = await client.leaseClient.leaseTimeToLive({ ID: id, keys: true });
  report.step('ttl', after.TTL, after.grantedTTL);
  client.close();
}

async function losses(report) {
  const client = await open(report);
  const lease = client.lease(60, { autoKeepAlive: false });
  const id = await lease.grant();
  await client.leaseClient.leaseRevoke({ ID: id });
  const lost = new Inbox();
  lease.on('lost', (error) => lost.put(error.constructor.name));
  await report.fails('keep-alive', async () => lease.keepaliveOnce().catch((error) => Promise.reject(new error.constructor('4711'))));
  report.step('reported', await lost.take(1));
  await report.fails('put', () => client.put(report.key('a')).value('1').lease(id));
  client.close();
}

// The client keeps a lease of two seconds alive while another, which it does not, ends.
async function keptAliveAndExpiry(report) {
  const client = await open(report);
  const begun = Date.now();
  const kept = client.lease(2);
  const succeeded = new Inbox();
  kept.on('keepaliveSucceeded', () => succeeded.put(true));
  const left = client.lease(2, { autoKeepAlive: false });
  await kept.put(report.key('kept')).value('1');
  await left.put(report.key('left')).value('1');
  const watcher = await client.watch().prefix(report.prefix).create();
  const inbox = new Inbox();
  watcher.on('delete', (kv) => inbox.put(report.name(kv.key)));
  report.step('expired', await inbox.take(1));
  report.step('not early', Date.now() - begun >= 2000);
  await succeeded.take(4, 'keep-alives');
  report.step('kept', await client.get(report.key('kept')).string());
  await kept.revoke();
  report.step('revoked', await inbox.take(1));
  client.close();
}

async function lostWithoutKeepAlive(report) {
  const client = await open(report);
  const lease = client.lease(2);
  const lost = new Promise((resolve) => lease.on('lost', resolve));
  const id = await lease.grant();
  await client.leaseClient.leaseRevoke({ ID: id });
  const error = await within(lost, 'the loss');
  report.step('lost', error.constructor.name);
  client.close();
}

run(life, losses, keptAliveAndExpiry, lostWithoutKeepAlive);
