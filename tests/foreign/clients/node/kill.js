// npm etcd3 knows all endpoints: every member dies once, in turn, while it watches, holds a lease and a lock, and leads.
'use strict';

const { ConstantBackoff } = require('cockatiel');
const { Etcd3 } = require('etcd3');
const { Inbox, run } = require('../shared/report');

// By default its watch waits up to half a minute before it tries again, longer than a test wants to.
function open(report) {
  return new Etcd3({ hosts: report.endpoints, faultHandling: { watchBackoff: new ConstantBackoff(100) } });
}

// Repeat what may be repeated until a member answers it.
async function persist(call) {
  for (let tries = 0; ; tries++) {
    try {
      return await call();
    } catch (error) {
      if (tries === 300) {
        throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
}

// No event is lost, doubled or out of order, whichever member the watch was on.
async function watchGoesOn(report) {
  const client = open(report);
  const watcher = await client.watch().prefix(report.prefix).create();
  const inbox = new Inbox();
  watcher.on('put', (kv) => inbox.put(report.name(kv.key)));
  const wanted = [];
  for (let member = 0; member < 3; member++) {
    await report.order('kill', member);
    await report.order('settle', member);
    for (let number = 0; number < 10; number++) {
      const name = `${member}${number}`;
      // Created once however often it is tried: one event a key.
      const key = report.key(name);
      await persist(() => client.if(key, 'Create', '==', 0).then(client.put(key).value('1')).commit());
      wanted.push(name);
    }
    const seen = await inbox.take(10);
    report.step('all, once, in order', member, seen.join() === wanted.slice(-10).join());
    await report.order('restart', member);
  }
  report.step('nothing else', inbox.items.length);
  await watcher.cancel();
  client.close();
}

// The client keeps its lease alive at whichever member is there; key, lock and lead stay its own.
async function leaseLockAndLead(report) {
  const client = open(report);
  const other = open(report);
  const lease = client.lease(10);
  let lost = 0;
  lease.on('lost', () => lost++);
  await lease.put(report.key('leased')).value('1');
  const lock = await client.lock(report.key('mutex')).ttl(10).acquire();
  const campaign = client.election(report.key('leader'), 10).campaign('me');
  campaign.on('error', () => lost++);
  await campaign.wait();
  for (let member = 0; member < 3; member++) {
    await report.order('kill', member);
    await report.order('settle', member);
    const value = await persist(() => other.get(report.key('leased')).string());
    const leader = await persist(() => other.election(report.key('leader')).leader());
    const second = await persist(() => other.if(report.key('mutex'), 'Create', '==', 0).then().commit());
    report.step('still', member, value, leader, second.succeeded, lost);
    await report.order('restart', member);
  }
  const fired = new Inbox();
  lease.on('keepaliveSucceeded', () => fired.put(true));
  await fired.take(1, 'keep-alives');
  await persist(() => lock.release());
  await persist(() => campaign.resign());
  await persist(() => lease.revoke());
  report.step('given up', await persist(() => other.getAll().prefix(report.prefix).count()));
  client.close();
  other.close();
}

run(watchGoesOn, leaseLockAndLead);
