"""Real etcd servers for tests: one, or a cluster, on free ports and in a temporary directory; they end with the test process.

with cluster(directory, 3) as etcd: connect(etcd.url); etcd.leader().kill()
"""

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import give_up
from tests.servers import Server, ServerMissing, find, free_port
from tests.waiting import until

HOST = "127.0.0.1"


@dataclass(kw_only=True)
class Cluster:
    """Some members of one cluster, each a server that can be killed, paused and started again."""

    members: list[Server]

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"{HOST}:{member.port}" for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.settle()

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def restart(self) -> None:
        """Kill all members and start them again; acknowledged writes are kept."""
        for member in self.members:
            member.kill()
        self.start()

    def settle(self, without: Server | None = None) -> None:
        """Wait until every member (but one) knows the same leader, which is one of them."""
        awake = [member for member in self.members if member is not without]
        until(lambda: self._agree(awake))

    def leader(self) -> Server:
        """Return the member that leads now."""
        return next(member for member in self.members if leads(member))

    def followers(self) -> list[Server]:
        """Return the others."""
        return [member for member in self.members if not leads(member)]

    def _agree(self, awake: list[Server]) -> bool:
        try:
            states = [ask(member, "maintenance/status") for member in awake]
        except OSError:
            return False
        leaders = {state.get("leader", "0") for state in states}
        return len(leaders) == 1 and leaders <= {state["header"]["member_id"] for state in states}


def leads(member: Server) -> bool:
    with contextlib.suppress(OSError):
        state = ask(member, "maintenance/status")
        return bool(state["header"]["member_id"] == state.get("leader"))
    return False


def ask(member: Server, path: str, body: dict[str, Any] | None = None, token: str = "") -> dict[str, Any]:
    """Send a request to one member's gateway, and return the answer; raise OSError when it is not running."""
    connection = http.client.HTTPConnection(HOST, member.port, timeout=2)
    try:
        headers = {"Authorization": token} if token else {}
        connection.request("POST", f"/v3/{path}", json.dumps(body or {}), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    except http.client.HTTPException as error:
        raise ConnectionError from error
    finally:
        connection.close()
    return answer


def make(directory: Path, count: int, *options: str) -> Cluster:
    program = find("etcd", package="etcd-server")
    ports = [(f"n{number}", free_port(), free_port()) for number in range(count)]
    all_peers = ",".join(f"{name}=http://{HOST}:{peer}" for name, _, peer in ports)
    return Cluster(
        members=[
            Server(
                directory=directory / name,
                port=port,
                command=[
                    *[program, "--name", name, "--data-dir", str(directory / name / "data"), *options],
                    *["--listen-client-urls", f"http://{HOST}:{port}"],
                    *["--advertise-client-urls", f"http://{HOST}:{port}"],
                    *["--listen-peer-urls", f"http://{HOST}:{peer}"],
                    *["--initial-advertise-peer-urls", f"http://{HOST}:{peer}"],
                    *["--initial-cluster", all_peers, "--initial-cluster-token", str(directory)],
                ],
                ready="listening for peers",
                url=f"etcd://{HOST}:{port}",
            )
            for name, port, peer in ports
        ]
    )


@contextlib.contextmanager
def cluster(directory: Path, count: int = 1, *options: str) -> Iterator[Cluster]:
    """Run a cluster for a fixture; skip, or fail under CI, when etcd is not installed."""
    try:
        etcd = make(directory, count, *options)
    except ServerMissing as missing:
        give_up(str(missing))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()
