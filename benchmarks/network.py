"""A slow interconnect on one machine: each rank in a network namespace of its own, on a bridge, at a given rate.

Every rank has a veth pair with ``tc``'s token bucket on both of its ends, so that neither what it sends nor what it
receives is faster, and a ``/dev/shm`` of its own, without which SGLang takes ranks for one node. The other ends are
ports of a bridge, which has an address itself: clients outside reach the servers inside. Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

INSIDE = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


class NetworkError(RuntimeError):
    """No slow network can be made here; the message says why, and what works."""


class SlowNetwork:
    """``ranks`` namespaces, made when entered and removed when left.

    Args:
        rate_mbit: of each rank, in each direction, in Mbit/s; Ethernet and TCP headers (some 4%) count.

    Raises:
        NetworkError: not root, no iproute2, or a kernel that lacks what is needed.
    """

    def __init__(self, ranks: int, rate_mbit: float) -> None:
        if os.geteuid() != 0:
            raise NetworkError("network namespaces need root: use sudo, or leave out --rate-mbit to run over loopback")
        if missing := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
            raise NetworkError(
                f"{', '.join(missing)} not found: apt-get install iproute2 util-linux, "
                "or leave out --rate-mbit to run over loopback"
            )
        pid = os.getpid()
        self.ranks, self.rate_mbit, self.bridge = ranks, rate_mbit, f"shb{pid}"
        self.names = [f"shift{pid}-{rank}" for rank in range(ranks)]
        self._outer = [f"sh{pid}-{rank}" for rank in range(ranks)]
        self._subnet = f"10.78.{pid % 256}"

    def address(self, rank: int) -> str:
        return f"{self._subnet}.{rank + 1}"

    def __enter__(self) -> SlowNetwork:
        remove_leftovers()
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.remove()
            raise NetworkError(f"{error.cmd}: {error.stderr.strip()}") from None
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self.remove()

    def _make(self) -> None:
        _sh(f"ip link add {self.bridge} type bridge")
        _sh(f"ip addr add {self._subnet}.254/24 dev {self.bridge}")
        _sh(f"ip link set {self.bridge} up")
        # The bucket has to hold the largest segment that TCP hands over; a queue of 0.2 s keeps TCP busy.
        shaped = f"root tbf rate {self.rate_mbit}mbit burst 128kb latency 200ms"
        for rank, (name, outer) in enumerate(zip(self.names, self._outer, strict=True)):
            _sh(f"ip netns add {name}")
            _sh(f"ip link add {outer} type veth peer name eth0 netns {name}")
            _sh(f"ip link set {outer} master {self.bridge} up")
            _sh(f"ip -n {name} addr add {self.address(rank)}/24 dev eth0")
            _sh(f"ip -n {name} link set eth0 up")
            _sh(f"ip -n {name} link set lo up")
            _sh(f"tc qdisc add dev {outer} {shaped}")
            _sh(f"tc -n {name} qdisc add dev eth0 {shaped}")

    def remove(self) -> None:
        for name in self.names:
            _sh(f"ip netns del {name}", check=False)
        for link in (*self._outer, self.bridge):  # a namespace takes its end of the pair along, but not at once
            _sh(f"ip link del {link}", check=False)

    def command(self, rank: int, command: list[str]) -> list[str]:
        """``command``, run as that rank's node."""
        return ["ip", "netns", "exec", self.names[rank], "unshare", "-m", "sh", "-c", INSIDE, "sh", *command]

    def environment(self, rank: int) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "eth0", "SGLANG_HOST_IP": self.address(rank)}

    def sent(self) -> list[int]:
        """Bytes that each rank has sent since the network was made, headers included."""
        at = Path("/sys/class/net")
        return [int((at / outer / "statistics" / "rx_bytes").read_text()) for outer in self._outer]

    def retransmitted(self) -> list[int]:
        """TCP segments that each rank has sent again: a link that drops makes runs slow in leaps."""
        found = []
        for name in self.names:
            shown = _sh(f"ip netns exec {name} cat /proc/net/snmp").splitlines()
            names, values = (line.split() for line in shown if line.startswith("Tcp:"))
            found.append(int(values[names.index("RetransSegs")]))
        return found


def remove_leftovers() -> list[str]:
    """Namespaces and bridges of harnesses that were killed before they could clean up; returns their names."""
    removed = []
    for kind, pattern in (("netns", r"^(shift(\d+)-\d+)\b"), ("link", r"^\d+: (shb(\d+))[:@]")):
        for line in _sh(f"ip {kind} show").splitlines():
            found = re.match(pattern, line)
            if found and not Path(f"/proc/{found[2]}").exists():
                _sh(f"ip {kind} del {found[1]}", check=False)
                removed.append(found[1])
    return removed


def _sh(command: str, check: bool = True) -> str:
    return subprocess.run(command.split(), check=check, capture_output=True, text=True).stdout
