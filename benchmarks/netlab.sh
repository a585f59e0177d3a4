#!/usr/bin/env bash
# Several "hosts" on one machine, joined by a switch over shaped links.
#
#   netlab.sh up LAB N RATE              hosts h0..h(N-1); RATE as tc writes it (200mbit)
#   netlab.sh down LAB                   end every process in the hosts, remove all
#   netlab.sh exec LAB HOST COMMAND ...  run a command on a host, in the current folder
#   netlab.sh ssh LAB HOST COMMAND ...   the same through a shell, as ssh would: a launch agent for mpirun
#   netlab.sh tx LAB                     bytes that each host has sent so far
#
# LAB is a state folder.  A host is a set of namespaces (network, hostname, mounts, System V IPC) held by
# one sleeping process: own address and hostname, own /dev/shm, so that no memory is shared between hosts,
# and own /etc/hosts; files and process ids are the machine's.  The links are veth pairs into one further
# network namespace, the switch; a token bucket (tc tbf) at both ends limits either direction.  Nothing is
# connected to the machine's own network.  Needs root, iproute2, util-linux.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
mtu=9000
lifetime=12h # a lab that nobody takes down, because its owner was killed, ends itself

die() { echo "netlab: $*" >&2; exit 1; }
pid_of() { cat "$lab/$1/pid" 2>/dev/null || die "no host $1 in $lab"; }
hosts() { local dir; for dir in "$lab"/h[0-9]*; do basename "$dir"; done; }
in_switch() { nsenter -t "$(cat "$lab/switch.pid")" -n "$@"; }
address() { echo "10.77.0.$((${1#h} + 1))"; }

# Enter a host and keep the folder; the command replaces this process.
enter() {
    local host=$1
    shift
    exec nsenter -t "$(pid_of "$host")" -n -u -m -i -W "$PWD" -- "$@"
}

# Hold new namespaces ("unshare" options in $2..) by a sleeping process; its pid goes to file $1.
hold() {
    local file=$1 pid
    shift
    setsid unshare "$@" sleep "$lifetime" </dev/null >/dev/null 2>"$lab/why" &
    pid=$!
    echo "$pid" >"$file"
    for _ in $(seq 500); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = sleep ] && return
        kill -0 "$pid" 2>/dev/null || die "could not make namespaces: $(cat "$lab/why")"
        sleep 0.01
    done
    die "could not make namespaces in 5 s"
}

# The processes in the network namespace of process $1, without that one.
pids_with() {
    local net pid
    net=$(readlink "/proc/$1/ns/net") || return 0
    for pid in $(cd /proc && echo [0-9]*); do
        if [ "$pid" != "$1" ] && [ "$(readlink "/proc/$pid/ns/net" 2>/dev/null)" = "$net" ]; then
            echo "$pid"
        fi
    done
}

kill_with() {
    local pids
    while pids=$(pids_with "$1") && [ -n "$pids" ]; do
        # shellcheck disable=SC2086  # one word a process
        kill -KILL $pids 2>/dev/null || true
    done
}

up() {
    local n=$1 rate=$2 k host pid
    local quiet=(net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1)
    # A bucket of a few frames, so that short messages pay for their bytes too.
    local bucket=(root tbf rate "$rate" burst $((4 * mtu)) latency 50ms)
    [ ! -e "$lab/switch.pid" ] || die "$lab is already up"
    mkdir -p "$lab"
    lab=$(realpath "$lab")
    echo "127.0.0.1 localhost" >"$lab/hosts"
    for ((k = 0; k < n; k++)); do echo "$(address "h$k") h$k" >>"$lab/hosts"; done
    hold "$lab/switch.pid" --net
    in_switch sysctl -qw "${quiet[@]}"
    in_switch ip link add br0 mtu "$mtu" type bridge
    for ((k = 0; k < n; k++)); do
        host=h$k
        mkdir -p "$lab/$host"
        hold "$lab/$host/pid" --net --uts --mount --ipc
        pid=$(pid_of "$host")
        nsenter -t "$pid" -u hostname "$host"
        nsenter -t "$pid" -m sh -c "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mount --bind '$lab/hosts' /etc/hosts"
        nsenter -t "$pid" -n sysctl -qw "${quiet[@]}" net.ipv4.tcp_congestion_control=reno
        in_switch ip link add "$host" mtu "$mtu" type veth peer name eth0 mtu "$mtu" netns "$pid"
        in_switch ip link set "$host" master br0 up
        nsenter -t "$pid" -n ip link set lo up
        nsenter -t "$pid" -n ip addr add "$(address "$host")/24" dev eth0
        nsenter -t "$pid" -n ip link set eth0 up
        nsenter -t "$pid" -n tc qdisc replace dev eth0 "${bucket[@]}"
        in_switch tc qdisc replace dev "$host" "${bucket[@]}"
    done
    in_switch ip link set br0 up
}

down() {
    local file
    for file in "$lab"/h[0-9]*/pid "$lab"/switch.pid; do
        if [ -s "$file" ]; then
            kill_with "$(cat "$file")"
            kill -KILL "$(cat "$file")" 2>/dev/null || true
        fi
        rm -f "$file"
    done
    for file in "$lab"/h[0-9]*; do rmdir "$file" 2>/dev/null || true; done
    rm -f "$lab"/{hosts,why}
}

[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | sed 's/^# \?//;/^set/d'; exit 2; }
verb=$1 lab=$2
shift 2
case $verb in
up) up "$@" ;;
down) down ;;
exec) enter "$@" ;;
ssh) host=$1; shift; enter "$host" sh -c "$*" ;;
tx) for host in $(hosts); do echo "$host $(in_switch ip -s link show "$host" | awk '/RX:/{getline; print $1}')"; done ;;
*) die "unknown command $verb" ;;
esac
