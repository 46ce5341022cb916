#!/bin/bash
# machine.sh KIND DIRECTORY: becomes the first process of a machine whose files are this one's under a layer of its own.
# KIND is `host` (systemd, as its namespaces' process 1) or `desk` (a process that only waits, to work from).
# Called in fresh namespaces; nothing outside of DIRECTORY is written. DIRECTORY/units has the units that a host starts with.
set -eu
kind=$1 directory=$2 root=$2/root
mkdir -p "$directory/upper" "$directory/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$directory/upper,workdir=$directory/work" "$root"
cd "$root"
ip link set lo up
if [ "$kind" = desk ]; then
  for name in proc dev sys; do mount --rbind "/$name" "$name"; done
  mount -t tmpfs tmpfs run
  cp -a "$directory/bin/." usr/local/bin/
  mount --rbind "$directory" mnt
  pivot_root . media
  umount -l /media
  exec sleep infinity
fi
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for name in run tmp var/log etc/systemd/system dev; do mount -t tmpfs tmpfs "$name"; done
mkdir dev/shm dev/pts dev/mqueue dev/hugepages run/lock
mount -t tmpfs tmpfs dev/shm
mount -t devpts devpts dev/pts -o newinstance,ptmxmode=0666
ln -s pts/ptmx dev/ptmx
for name in null zero full random urandom tty; do
  touch "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
cp -a "$directory/units" run/units
pivot_root . media
umount -l /media
mount --make-rshared /  # as for every systemd: the copies of a unit's credentials are mounts that others see
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units \
  /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=no
