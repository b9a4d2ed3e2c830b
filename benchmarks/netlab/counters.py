"""What the kernel counted on a link of the lab: bytes and packets sent and received, whoever sent them.

The counters belong to the kernel, so they check a prediction made by our own code without sharing it.
They see a segment before the network card would split it (veth does not split), so the headers of a
large send count once where the link is not shaped, and once a packet of 1,514 bytes where it is slow enough for its
shaper to split. What a program sent is its payload: bytes less `HEADER_BYTES` of every packet, those that only
acknowledge among them.

Source: Linux, Documentation/ABI/testing/sysfs-class-net-statistics.
"""

from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 with 12 of time stamps
INTERFACE = "eth0"
INTERFACES = Path("/sys/class/net")
HARDWARE_PREFIX = "02:61:72:6d"  # a locally administered address that spells "arm": only labs have it


@dataclass(frozen=True)
class Counted:
    """Bytes that crossed one host's link, as the kernel counted them, and in how many packets they were sent."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int = 0

    def __post_init__(self) -> None:
        if min(self.sent_bytes, self.received_bytes, self.sent_packets) < 0:
            raise ValueError(f"counters: want bytes >= 0, got {self.sent_bytes} and {self.received_bytes}")

    @property
    def sent_payload_bytes(self) -> int:
        """Without headers."""
        return max(0, self.sent_bytes - HEADER_BYTES * self.sent_packets)

    def __sub__(self, earlier: "Counted") -> "Counted":
        return Counted(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
        )


def hardware_address(host: int) -> str:
    """The address of host number `host`, 0 to 65535."""
    return f"{HARDWARE_PREFIX}:{host >> 8:02x}:{host & 0xFF:02x}"


def counted_bytes() -> Counted:
    """Bytes sent and received so far by the host this rank runs on; all ranks of a host read the same.

    Raises:
        RuntimeError: not inside a lab. The machine's own eth0 would answer too, with something else.
    """
    link = INTERFACES / INTERFACE
    address = (link / "address").read_text().strip() if link.exists() else "no such interface"
    if not address.startswith(HARDWARE_PREFIX):
        raise RuntimeError(
            f"counters: this {INTERFACE} is no lab's ({address}); start it with `python benchmarks/netlab`"
        )
    statistics = link / "statistics"
    names = ("tx_bytes", "rx_bytes", "tx_packets")
    return Counted(*(_number(statistics / name) for name in names))


def _number(path: Path) -> int:
    return int(path.read_text())
