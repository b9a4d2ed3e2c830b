"""A writer's side of a Redis or Valkey server, for streams on other nodes.

As in a folder, but a snapshot is a value, and its state the list that has its id: `ready-R`, then `held-READER`. A
writer has a list of its own, so that it drops its own. What belongs together is sent in one transaction. Nothing
of the library is imported: the writer brings what is written.
"""

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("a redis:// store needs redis-py: pip install 'armillary[redis]'") from error

__all__ = ["Connection", "WriterLists"]

T = TypeVar("T")
Command = Sequence[Any]
BETWEEN_TRIES_SECONDS = 0.05
ANSWER_SECONDS = 600  # after which an answer that nobody fetched is gone


class Connection:
    """A connection with a name, which the server drops when this process is dead. A command whose connection is lost
    is sent again until patience has gone, so each must be one that may be sent twice.

    Raises:
        ValueError: the server removes keys when its memory is full, or the address is not as wanted.
        RuntimeError: another process has that name.
    """

    def __init__(self, url: str, name: str, patience: float) -> None:
        parts = urlsplit(url)
        self.prefix, self.patience = parts.path.strip("/"), patience
        if not self.prefix or "/" in self.prefix:
            raise ValueError(f"want {parts.scheme}://host:port/name, got {url}")
        retry = Retry(NoBackoff(), 0)
        address = parts._replace(path="").geturl()
        self.client = redis.Redis.from_url(address, client_name=self.key(name), retry=retry, socket_timeout=30)
        memory = self("INFO", "memory")
        if int(memory["maxmemory"]) and memory["maxmemory_policy"] != "noeviction":
            raise ValueError(f"{url} evicts keys by {memory['maxmemory_policy']}; want maxmemory-policy noeviction")
        until = time.monotonic() + 0.5  # the connection of a process that died may stand for an instant
        while self.names().count(name) > 1:
            if time.monotonic() > until:
                raise RuntimeError(f"{name} of {url} is another process; give each process its own place")
            time.sleep(BETWEEN_TRIES_SECONDS)

    def key(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def __call__(self, command: str, *arguments: Any) -> Any:
        return self._again(lambda: self.client.execute_command(command, *arguments))

    def at_once(self, *commands: Command) -> list[Any]:
        """All of them or none."""

        def send() -> list[Any]:
            pipe = self.client.pipeline(transaction=True)
            for command in commands:
                pipe.execute_command(*command)
            return pipe.execute()

        return self._again(send)

    def _again(self, send: Callable[[], T]) -> T:
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                return send()
            time.sleep(BETWEEN_TRIES_SECONDS)
        return send()

    def names(self) -> list[str]:
        """Of those that are connected, and so alive."""
        names = [one["name"] for one in self("CLIENT LIST")]
        return [name.removeprefix(f"{self.prefix}:") for name in names if name.startswith(f"{self.prefix}:")]

    def close(self) -> None:
        self.client.close()


class WriterLists:
    """See `writer.WriterFiles`, whose calls these are."""

    def __init__(self, url: str, rank: int, keep: int, patience: float) -> None:
        self.rank, self.keep = rank, keep
        self.send = Connection(url, f"writer-{rank}", patience)
        self.ready, self.dropped, self.mine = (
            self.send.key(f"{name}-{rank}") for name in ("ready", "dropped", "writer")
        )
        self._drop_begun()

    def record(self) -> bytes:
        return self.send("GET", self.mine) or b""

    def say(self, record: Any) -> None:
        self.send.at_once(*self._saying(record))

    def _saying(self, record: Any) -> list[Command]:
        return [("SET", self.mine, record.packed()), ("SET", self.send.key("ranks"), record.ranks)]

    def left(self) -> int:
        return int(self.send("LLEN", self.ready))

    def clear(self) -> None:
        while self.drop():
            pass

    def reserve(self, nbytes: int) -> None:
        """A server keeps no place."""

    def has_room(self) -> bool:
        return self.left() < self.keep

    def drop(self, but: int = 0) -> bool:
        if self.left() <= but or self.send("LMOVE", self.ready, self.dropped, "LEFT", "RIGHT") is None:
            return False
        self._drop_begun()
        return True

    def _drop_begun(self) -> None:
        """Also what this writer had taken from its list when it died."""
        for id in self.send("LRANGE", self.dropped, 0, -1):
            self.send.at_once(("DEL", self.send.key(f"data-{id.decode()}")), ("LREM", self.dropped, 0, id))

    def put(self, parts: Sequence[bytes | memoryview], record: Any) -> None:
        self.send.at_once(
            ("LREM", self.ready, 0, str(record.id)),  # where it is sent a second time
            ("SET", self.send.key(f"data-{record.id}"), b"".join(parts)),
            ("RPUSH", self.ready, str(record.id)),
            *self._saying(record),
        )

    def stop_asked(self, run: str) -> bool:
        return bool(self.send("EXISTS", self.send.key(f"stop-{run}-{self.rank}")))

    def alive(self) -> list[str]:
        return [name for name in self.send.names() if name.startswith(("reader", "server"))]

    def request(self, number: int, parts: Sequence[bytes | memoryview]) -> None:
        asked = f"{number}-{self.rank}"
        key = self.send.key(f"ask-{asked}")
        self.send.at_once(
            ("SET", key, b"".join(parts), "EX", ANSWER_SECONDS),
            ("LREM", self.send.key("asks"), 0, asked),
            ("RPUSH", self.send.key("asks"), asked),
        )

    def answer(self, number: int) -> BinaryIO | None:
        key = self.send.key(f"answer-{number}-{self.rank}")
        if (raw := self.send("GET", key)) is None:
            return None
        self.send("DEL", key)
        return io.BytesIO(raw)

    def forget(self) -> None:
        """What nobody asks for any more goes by itself."""

    def close(self, record: Any) -> None:
        if record:
            self.say(record)
        self.send.close()
