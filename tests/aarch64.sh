#!/usr/bin/env bash
# The game, the jail and the rewards on aarch64 without the hardware: Debian 13 in an emulated machine.
#
#     tests/aarch64.sh FOLDER [TESTS...]     of what is committed; FOLDER keeps what is downloaded; needs root
#
# A whole machine, because emulating single programs has no seccomp. It is unpacked, not installed, so nothing foreign
# runs here, and it lives in memory, so it needs no disk. From Debian: mmdebstrap, qemu-system-arm, cpio. Read what it
# prints: its exit code is that of the machine.
set -euo pipefail

project=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?name a folder for what is downloaded}
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
shift
. "$project/tests/elsewhere.sh"
tests=${*:-${elsewhere[*]}}

cd "$folder"
if [[ ! -e root/ready ]]; then
    rm -rf root
    mmdebstrap --arch=arm64 --variant=extract --include=python3,busybox-static,linux-image-arm64 trixie root
    mv root/boot/vmlinuz-* kernel
    rm -rf root/boot root/usr/lib/modules root/usr/share/doc root/usr/share/locale
    for name in bin sbin lib; do ln -sfn usr/$name root/$name; done
    mkdir -p root/{proc,sys,tmp,dev,root}
    (cd "$project" && needed_elsewhere) | xargs python3 -m pip install --quiet --target root/site \
        --platform manylinux2014_aarch64 --python-version 3.13 --only-binary=:all:
    touch root/ready
fi
rm -rf root/project
git clone --quiet --depth 1 "file://$project" root/project
cat > root/init <<END
#!/usr/bin/busybox sh
busybox mount -t proc proc /proc; busybox mount -t sysfs sys /sys
busybox mount -t tmpfs tmp /tmp; busybox mount -t devtmpfs dev /dev
export PATH=/usr/sbin:/usr/bin PYTHONPATH=/site HOME=/tmp LANG=C.UTF-8
uname -srm; python3 -V; cd /project
python3 -m pytest -q -n 2 -p no:cacheprovider --color=no $tests
echo "exit code \$?"
busybox poweroff -f
END
chmod +x root/init
(cd root && find . | cpio --quiet -o -H newc) > initrd
qemu-system-aarch64 -M virt,gic-version=3 -cpu max,pauth-impdef=on -accel tcg,thread=multi -smp 2 -m 4096 -nographic \
    -no-reboot -nic none -kernel kernel -initrd initrd -append "console=ttyAMA0 quiet"
