"""Two hosts on one machine: network namespaces joined by a wire, which a test can cut. Source: ip-netns(8), veth(4)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

NAMES = (f"sw{os.getpid()}a", f"sw{os.getpid()}b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def cut(host: str) -> None:
    """Take this host's end of the wire down: what it sends, and what is sent to it, is lost without a word."""
    ip("-n", host, "link", "set", "wire", "down")


def join(host: str) -> None:
    ip("-n", host, "link", "set", "wire", "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Skips the test where this machine has no network namespaces, or this user may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (Debian: iproute2)")
    with contextlib.ExitStack() as made:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                made.callback(ip, "netns", "del", name)
            ip("-n", NAMES[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
            for address, name in zip(ADDRESSES, NAMES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                for link in ("lo", "wire"):
                    ip("-n", name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield NAMES
