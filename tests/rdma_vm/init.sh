#!/bin/busybox sh
# /init of the guest. Its root is the host's, read-only, below the unpacked packages and a tmpfs.
# Makes the soft-RoCE device rxe0, then runs what the host asks for, one command at a time:
# a line NAME on the virtio port runs share/NAME, its output goes to share/NAME.out, and the line
# "NAME STATUS" is the answer.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for command in mount mkdir insmod ip chroot hostname poweroff cat; do
  alias $command="/bin/busybox $command"
done

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
  case $module in *dummy.ko) options=numdummies=0 ;; *) options= ;; esac
  insmod "$module" $options
done

# From the kernel's command line: jaxhet.netdev=dummy or eth0, jaxhet.address, jaxhet.mtu.
for word in $(cat /proc/cmdline); do
  case $word in jaxhet.*) eval "${word#jaxhet.}" ;; esac
done

share() { # share TAG FOLDER OPTIONS
  mount -t 9p -o "trans=virtio,version=9p2000.L,msize=1048576,$3" "$1" "$2"
}
share host /host ro,cache=loose && share packages /packages ro,cache=loose || poweroff -f
mount -t tmpfs -o size=75% tmpfs /overlay
mkdir /overlay/upper /overlay/work
mount -t overlay -o lowerdir=/packages:/host,upperdir=/overlay/upper,workdir=/overlay/work \
  overlay /newroot || poweroff -f
for folder in proc sys dev; do mount --move /$folder /newroot/$folder; done
mkdir -p /newroot/dev/shm /newroot/dev/pts
mount -t tmpfs tmpfs /newroot/dev/shm
mount -t devpts devpts /newroot/dev/pts
mount -t tmpfs tmpfs /newroot/run
mkdir /newroot/run/share
share share /newroot/run/share cache=none || poweroff -f

# A name that resolves, which JAX's CPU collectives want.
hostname guest
echo "$address guest" >>/newroot/etc/hosts
ip link set lo up
[ "$netdev" != dummy ] || ip link add dummy type dummy
ip link set "$netdev" mtu "$mtu"
ip addr add "$address/24" dev "$netdev"
ip link set "$netdev" up
chroot /newroot rdma link add rxe0 type rxe netdev "$netdev"

ulimit -l unlimited
ulimit -c 0
exec 3<>/newroot/dev/vport0p1
echo "up 0" >&3
while read -r name <&3; do
  chroot /newroot /bin/sh "/run/share/$name" </newroot/dev/null >"/newroot/run/share/$name.out" 2>&1 3>&-
  echo "$name $?" >&3
done
poweroff -f
