"""The links of a lab: one veth pair a host, all on one bridge, each end behind a token bucket.

        host 0 (10.77.0.1)   host 1 (10.77.0.2)   ...
          eth0 [bucket]        eth0 [bucket]
            |                    |
          port0 [bucket]       port1 [bucket]
         ------------------ bridge ------------------   (namespace `switch`)

The bridge has a namespace of its own, so the machine's own interfaces are neither used nor changed.
Nothing speaks on these links but what the ranks send: IPv6, which announces itself, stays off.

A lab has a congestion control of its own, not the machine's. Under BBR, the default of some machines, connections that
are idle most of the time, as those of a training step are, come to be paced far below their links, and everyone
waits (`stalls.py`). Reno is what any namespace may choose; Linux's usual Cubic is not, and on links that lose nothing
both do the same.

Source: veth(4), tc-tbf(8). Departures from a real network: no propagation delay (the kernel this was
made on has no netem) and no loss but what the 400 ms queue drops.
"""

import json

from benchmarks.netlab.counters import INTERFACE, Counted, hardware_address
from benchmarks.netlab.namespaces import LabName, tell

BURST_SECONDS, LEAST_BURST_BYTES = 1e-3, 1 << 14  # what a rested link passes at once: small messages must not slip by
LARGEST_PACKET_BYTES = 1 << 16  # that the kernel passes from one host to another as one
NO_IPV6 = "entry=/proc/sys/net/ipv6/conf/default/disable_ipv6; test ! -e $entry || echo 1 > $entry"
RENO = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
MOST_HOSTS = 250  # what one /24 holds


def address(host: int) -> str:
    """The address of a host; every lab uses the same ones, as labs do not see one another."""
    return f"10.77.0.{host + 1}"


def lay(name: LabName, hosts: int) -> None:
    """Makes the bridge and `hosts` hosts on it, all links up and unshaped.

    Raises:
        LabUnavailable: the kernel refuses.
    """
    _add(name.switch)
    _batch(name.switch, "link add bridge type bridge mcast_snooping 0", "link set bridge up")
    for host in range(hosts):
        there, port = name.host(host), f"port{host}"
        _add(there)
        _batch(
            name.switch,
            f"link add {port} type veth peer name {INTERFACE} netns {there}",
            f"link set {port} master bridge up",
        )
        _batch(
            there,
            f"link set {INTERFACE} address {hardware_address(host)}",
            f"address add {address(host)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            "link set lo up",
        )


def shape(name: LabName, hosts: int, mbit_per_second: float, whole_packets: bool = False) -> None:
    """Holds every link to a speed in each direction; 0 takes the limit away.

    Args:
        whole_packets: what a host hands over as one, up to 64 KiB, passes as one; the link is then busy for as long.
    """
    burst = max(LEAST_BURST_BYTES, round(mbit_per_second * 1e6 / 8 * BURST_SECONDS))
    rate = ("rate", f"{mbit_per_second:g}mbit", "burst", f"{burst}b")
    is_cut = burst < LARGEST_PACKET_BYTES  # tbf cuts what is longer than its burst, htb does not
    for host in range(hosts):
        for there, interface in ((name.host(host), INTERFACE), (name.switch, f"port{host}")):
            root = ("-n", there, "qdisc", "replace", "dev", interface, "root")
            if mbit_per_second <= 0 or (is_cut and whole_packets):  # a htb that is there can only be taken away
                tell("tc", *root, "noqueue")
            if mbit_per_second > 0 and is_cut and whole_packets:
                tell("tc", *root, "handle", "1:", "htb", "default", "1")
                inside = ("class", "replace", "dev", interface, "parent", "1:", "classid", "1:1")
                tell("tc", "-n", there, *inside, "htb", *rate, "cburst", f"{burst}b")
            elif mbit_per_second > 0:
                tell("tc", *root, "tbf", *rate, "latency", "400ms")


def count(name: LabName, host: int) -> Counted:
    """What the kernel counted on a host's link since it was laid."""
    (link,) = json.loads(tell("ip", "-n", name.host(host), "-s", "-j", "link", "show", "dev", INTERFACE))
    sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
    return Counted(sent["bytes"], received["bytes"], sent["packets"])


def _add(namespace: str) -> None:
    tell("ip", "netns", "add", namespace)
    tell("ip", "netns", "exec", namespace, "sh", "-c", f"{NO_IPV6}; {RENO}")


def _batch(namespace: str, *lines: str) -> None:
    tell("ip", "-n", namespace, "-batch", "-", lines="\n".join(lines))
