// npm etcd3 as a user: a password over TLS, the common name of a certificate, and what either may do.
'use strict';

const fs = require('fs');
const { Etcd3 } = require('etcd3');
const { Inbox, run } = require('../shared/report');

const HOME = process.env.FOREIGN_CERTS;
const THEIRS = '~others';

function connect(report, name, auth) {
  const credentials = {
    rootCertificate: fs.readFileSync(`${HOME}/ca.crt`),
    privateKey: fs.readFileSync(`${HOME}/${name}.key`),
    certChain: fs.readFileSync(`${HOME}/${name}.crt`),
  };
  return new Etcd3({ hosts: report.endpoints.map((one) => `https://${one}`), credentials, auth });
}

async function use(report, client) {
  const key = report.key('a');
  const watcher = await client.watch().key(key).create();
  const inbox = new Inbox();
  watcher.on('put', (kv) => inbox.put(kv.value.toString()));
  await client.put(key).value('1');
  report.step('own', await client.get(key).string(), await inbox.take(1));
  await watcher.cancel();
  report.step('deleted', (await client.delete().key(key)).deleted);
  await report.fails('get', () => client.get(THEIRS));
  await report.fails('put', () => client.put(THEIRS).value('1').exec());
  await report.fails('delete', () => client.delete().key(THEIRS).exec());
  await report.fails('all', () => client.getAll().strings());
  client.close();
}

async function by_password(report) {
  await use(report, connect(report, 'nobody', { username: 'alice', password: 'alice-pw' }));
}

async function by_certificate(report) {
  await use(report, connect(report, 'alice'));
}

async function refused(report) {
  for (const [username, password] of [['alice', 'wrong'], ['none', 'alice-pw']]) {
    const client = connect(report, 'nobody', { username, password });
    await report.fails(username, () => client.get(report.key('a')).string());
    client.close();
  }
  const client = connect(report, 'nobody');
  await report.fails('nobody', () => client.get(report.key('a')).string());
  client.close();
}

run(by_password, by_certificate, refused);
