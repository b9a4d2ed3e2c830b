"""A stream's side of a Redis or Valkey server, and a server's; the calls are those of `folder.py`.

Every reader takes from all lists, in turn; readers of an ordered stream have writers of their own, as in a folder.
"""

import io

from armillary.feeds.folder import Look, Place, Ready, Share, id_of
from armillary.feeds.redis_writer import ANSWER_SECONDS, Connection
from armillary.feeds.writer import Header, Parts, Snapshot, read

__all__ = ["ReaderLists", "ServerLists"]


class ReaderLists:
    """See `folder.ReaderFiles`."""

    def __init__(self, url: str, reader: Share, share: Share, patience: float) -> None:
        self.reader, self.share = reader, share
        self.send = Connection(url, f"reader-{reader.reader}", patience)
        self.held, self.count = (self.send.key(f"{name}-{reader.reader}") for name in ("held", "taken"))
        self.send("SADD", self.send.key("readers"), reader.reader)
        self.taken, self.ranks = int(self.send("GET", self.count) or 0), 0

    def look(self) -> Look:
        records = {rank: one for rank, one in self.records().items() if self.share.has(rank)}
        self._free_held()
        held = self.send("LRANGE", self.held, 0, -1)
        waiting = [Ready(id_of(one.decode()), self.held) for one in held]
        for rank in filter(self.share.has, range(self.ranks)):
            ready = self.send.key(f"ready-{rank}")
            waiting += [Ready(id_of(one.decode()), ready) for one in self.send("LRANGE", ready, 0, -1)]
        return Look(records, sorted(waiting))

    def records(self) -> dict[int, Header]:
        self.ranks = int(self.send("GET", self.send.key("ranks")) or 0)
        keys = [self.send.key(f"writer-{rank}") for rank in range(self.ranks)]
        found = enumerate(self.send("MGET", *keys) if keys else [])
        return {rank: record for rank, raw in found if raw and (record := Header.parse(raw))}

    def _free_held(self) -> None:
        """What dead readers held that this job does not have."""
        for index in map(int, self.send("SMEMBERS", self.send.key("readers"))):
            if index >= self.reader.readers and f"reader-{index}" not in self.send.names():
                for id in self.send("LRANGE", self.send.key(f"held-{index}"), 0, -1):
                    back = self.send.key(f"ready-{id_of(id.decode()).rank}")
                    self.send.at_once(("LREM", self.send.key(f"held-{index}"), 0, id), ("LPUSH", back, id))

    def take(self, waiting: Ready, place: Place) -> Header | None:
        """Another reader may have been first: then it is the next of that writer, or None."""
        id = str(waiting.id)
        if waiting.name != self.held:
            moved = self.send("LMOVE", waiting.name, self.held, "LEFT", "RIGHT")
            if moved is None:
                return None
            id = moved.decode()
        data = self.send.key(f"data-{id}")
        raw, header = self.send("GET", data), None
        if raw is not None:  # else it was put twice, since a connection was lost, and taken before
            header = read(io.BytesIO(raw), place).header
            if str(header.id) != id:
                raise RuntimeError(f"a snapshot is torn: {header.id} lies where {id} should")
            self.taken += 1
        self.send.at_once(("DEL", data), ("LREM", self.held, 0, id), ("SET", self.count, self.taken))
        return header

    def is_alive(self, rank: int) -> bool:
        return f"writer-{rank}" in self.send.names()

    def stop(self) -> None:
        for rank, record in self.records().items():
            self.send("SET", self.send.key(f"stop-{record.id.run}-{rank}"), 1)

    def sweep(self) -> None:
        """Nothing is left there but what was said."""

    def close(self) -> None:
        self.send.close()


class ServerLists:
    """See `folder.ServerFiles`."""

    def __init__(self, url: str, patience: float) -> None:
        self.send = Connection(url, "server", patience)
        self.asks, self.begun = self.send.key("asks"), self.send.key("asked")
        while self.send("LMOVE", self.begun, self.asks, "RIGHT", "LEFT") is not None:
            pass

    def questions(self) -> list[Snapshot]:
        found = []
        while (asked := self.send("LMOVE", self.asks, self.begun, "LEFT", "RIGHT")) is not None:
            if (raw := self.send("GET", self.send.key(f"ask-{asked.decode()}"))) is not None:
                found.append(read(io.BytesIO(raw)))
            else:
                self.send("LREM", self.begun, 0, asked)
        return found

    def answer(self, question: Header, parts: Parts) -> None:
        asked = f"{question.id.step}-{question.id.rank}"
        self.send.at_once(
            ("SET", self.send.key(f"answer-{asked}"), b"".join(parts), "EX", ANSWER_SECONDS),
            ("DEL", self.send.key(f"ask-{asked}")),
            ("LREM", self.begun, 0, asked),
        )

    def close(self) -> None:
        self.send.close()
