// npm etcd3: its election recipe: campaign, proclaim, observe, resign, handover.
'use strict';

const { Etcd3 } = require('etcd3');
const { Inbox, run, within } = require('../shared/report');

async function handover(report) {
  const clients = Array.from({ length: 3 }, () => new Etcd3({ hosts: report.endpoints }));
  const elections = clients.map((client) => client.election(report.key('leader'), 60));
  report.step('nobody', (await elections[0].leader()) ?? null);
  const first = elections[0].campaign('first');
  await within(first.wait(), 'the first to be elected');
  report.step('leader', await elections[2].leader());
  const second = elections[1].campaign('second');
  const waiting = new Inbox();
  second.on('_isWaiting', () => waiting.put(true));
  let elected = false;
  const won = second.wait().then(() => (elected = true));
  await waiting.take(1, 'waiting');
  report.step('second waits', elected);
  await first.proclaim('first again');
  report.step('leader', await elections[2].leader());
  await first.resign();
  await within(won, 'the second to be elected');
  report.step('leader', await elections[2].leader());
  await report.fails('proclaim after resigning', () => first.proclaim('too late'));
  await second.resign();
  report.step('nobody', (await elections[0].leader()) ?? null);
  clients.forEach((client) => client.close());
}

async function observed(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  const other = new Etcd3({ hosts: report.endpoints });
  const election = client.election(report.key('leader'), 60);
  const observer = await election.observe();
  const changes = new Inbox();
  observer.on('change', (leader) => changes.put(leader ?? null));
  const campaign = other.election(report.key('leader'), 60).campaign('one');
  await within(campaign.wait(), 'to be elected');
  report.step('elected', await changes.take(1));
  await campaign.proclaim('two');
  report.step('proclaimed', await changes.take(1), observer.leader());
  await campaign.resign();
  report.step('resigned', await changes.take(1));
  await observer.cancel();
  client.close();
  other.close();
}

// A leader whose lease ends is followed by the next.
async function leaderLost(report) {
  const [client, other] = [new Etcd3({ hosts: report.endpoints }), new Etcd3({ hosts: report.endpoints })];
  const first = client.election(report.key('leader'), 60).campaign('first');
  await within(first.wait(), 'the first');
  const errors = new Inbox();
  first.on('error', (error) => errors.put(error.constructor.name));
  const second = other.election(report.key('leader'), 60).campaign('second');
  const waiting = new Promise((resolve) => second.on('_isWaiting', resolve));
  await within(waiting, 'the second to wait');
  await other.leaseClient.leaseRevoke({ ID: await first.lease.grant() });
  await within(second.wait(), 'the second');
  report.step('leader', await other.election(report.key('leader')).leader());
  await first.lease.keepaliveOnce().catch(() => undefined);
  report.step('the first gets', await errors.take(1));
  await second.resign();
  client.close();
  other.close();
}

run(handover, observed, leaderLost);
