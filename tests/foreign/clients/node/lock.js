// npm etcd3: its lock, which does not wait, and mutual exclusion by trying again.
'use strict';

const { Etcd3 } = require('etcd3');
const { Inbox, run } = require('../shared/report');

async function acquireAndRelease(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  const name = report.key('mutex');
  const first = await client.lock(name).ttl(60).acquire();
  report.step('held', await client.get(name).exists());
  await report.fails('another', () => client.lock(name).acquire().catch((error) => Promise.reject(new error.constructor('mutex'))));
  await first.release();
  report.step('released', await client.get(name).exists());
  report.step('do', await client.lock(name).do(() => client.get(name).exists()), await client.get(name).exists());
  client.close();
}

async function lostWithItsLease(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  const name = report.key('mutex');
  const lock = await client.lock(name).ttl(60).acquire();
  const watcher = await client.watch().key(name).create();
  const inbox = new Inbox();
  watcher.on('delete', (kv) => inbox.put(report.name(kv.key)));
  await client.leaseClient.leaseRevoke({ ID: await lock.leaseId() });
  report.step('lost', await inbox.take(1));
  const second = await client.lock(name).acquire();
  report.step('another has it', await client.get(name).exists());
  await second.release();
  client.close();
}

async function counting(report) {
  const client = new Etcd3({ hosts: report.endpoints });
  const [name, key] = [report.key('mutex'), report.key('number')];
  await client.put(key).value(0);
  const freed = async () => {
    const watcher = await client.watch().key(name).only('delete').create();
    const gone = new Promise((resolve) => watcher.once('delete', resolve));
    if (await client.get(name).exists()) {
      await gone;
    }
    await watcher.cancel();
  };
  const add = async () => {
    for (;;) {
      const lock = client.lock(name).ttl(60);
      try {
        await lock.acquire();
      } catch {
        await freed();
        continue;
      }
      await client.put(key).value((await client.get(key).number()) + 1);
      await lock.release();
      return;
    }
  };
  await Promise.all(Array.from({ length: 8 }, add));
  report.step('number', await client.get(key).number());
  client.close();
}

run(acquireAndRelease, lostWithItsLease, counting);
