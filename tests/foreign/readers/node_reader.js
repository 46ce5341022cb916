// npm etcd3 (grpc-js): ranges and watches of any size, see report.py.
'use strict';

const { createHash } = require('crypto');
const { Etcd3 } = require('etcd3');

async function ranged(client, prefix) {
  const response = await client.getAll().prefix(prefix).exec();
  return response.kvs.map((kv) => kv.value);
}

async function watched(client, prefix, revision, count) {
  const values = [];
  const watcher = await client.watch().prefix(prefix).startRevision(String(revision)).create();
  await new Promise((resolve, reject) => {
    watcher.on('error', reject);
    watcher.on('data', (response) => {
      values.push(...response.events.map((event) => event.kv.value));
      if (values.length >= count) {
        resolve();
      }
    });
  });
  await watcher.cancel();
  return values.slice(0, count);
}

async function main() {
  const asked = JSON.parse(process.argv[process.argv.length - 1]);
  const client = new Etcd3({
    hosts: `${asked.host}:${asked.port}`,
    grpcOptions: { 'grpc.max_receive_message_length': -1 },
  });
  for (const [kind, prefix, revision, count] of asked.reads) {
    const values = await (kind === 'range' ? ranged : watched)(client, prefix, revision, count);
    const digest = createHash('sha256');
    values.forEach((value) => digest.update(value));
    console.log(JSON.stringify([values.length, digest.digest('hex')]));
  }
  client.close();
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
