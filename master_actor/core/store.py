"""A group's key-value store: the master's side, without I/O.

A request that is sent again after a lost connection counts once: each written key keeps the answers ("stamps") that
its writers have not confirmed yet, in the same journal record as the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from master_actor.core.records import DurableGroup, Record, Stamp, Stored, StoreWritten
from ray_pccl.control.messages import Failure, Reply, StoreOp, StoreRequest

MAX_VALUE_BYTES = 4 << 20
MAX_SHOWN = 40
"""How many keys, and how much of each, an error names."""
MAX_SUM = 2**63 - 1
_MISSING = Stored(None)
_VALUES_PER_KEY = {StoreOp.SET: 1, StoreOp.APPEND: 1, StoreOp.COMPARE_SET: 2, StoreOp.ADD: 0, StoreOp.DELETE: 0}


@dataclass(frozen=True, slots=True)
class Pending:
    """A request that waits for keys."""

    peer_id: str
    request: StoreRequest
    deadline: float


class Store:
    """Serves the store requests of one group's members."""

    def __init__(
        self, durable: DurableGroup, append: Callable[[Record], None], reply: Callable[[str, Reply], None]
    ) -> None:
        self._durable = durable
        self._append = append
        self._reply = reply
        self.pending: dict[tuple[str, int], Pending] = {}
        self._stamped: dict[str, dict[int, set[str]]] = {}
        for key, stored in durable.store.items():
            for stamp in stored.stamps:
                self._note(stamp.peer_id, stamp.number, key)

    def request(self, peer_id: str, request: StoreRequest, now: float) -> None:
        """Answers the request, at once or when its keys are there or its time is up."""
        self._forget(peer_id, below=request.acknowledged)
        match request.op:
            case StoreOp.GET | StoreOp.WAIT:
                pending = Pending(peer_id, request, now + request.timeout_s)
                if not self._serve(pending):
                    self.pending[peer_id, request.number] = pending
            case StoreOp.CHECK:
                self._reply(peer_id, Reply(request.number, flag=self._has_all(request.keys)))
            case StoreOp.NUM_KEYS:
                amount = sum(stored.value is not None for stored in self._durable.store.values())
                self._reply(peer_id, Reply(request.number, amount=amount))
            case _:
                self._write_all(peer_id, request)
                self._wake()

    def tick(self, now: float) -> None:
        """Ends the waits whose time is up."""
        for key, pending in list(self.pending.items()):
            if now >= pending.deadline:
                del self.pending[key]
                missing = [name for name in pending.request.keys if not self._has_all((name,))]
                named = ", ".join(repr(name[:MAX_SHOWN]) for name in missing[:MAX_SHOWN])
                text = (
                    f"timeout: after {pending.request.timeout_s:g} s the store of group {self._durable.name!r} "
                    f"still has no {named}" + (", ..." if len(missing) > MAX_SHOWN else "")
                )
                failure = Failure("StoreTimeoutError", text, {"keys": tuple(missing[:MAX_SHOWN])})
                self._reply(pending.peer_id, Reply(pending.request.number, failure=failure))

    def drop(self, peer_id: str) -> None:
        """Forgets a peer that is gone."""
        keys = {key for keys in self._stamped.get(peer_id, {}).values() for key in keys}
        self._forget(peer_id, below=None)
        for key in keys & self._durable.store.keys():  # nobody will strip these after a restart, so it is a record
            stored = self._durable.store[key]
            self._append(StoreWritten(self._durable.name, key, stored.value, stored.stamps))
        self.pending = {key: waiting for key, waiting in self.pending.items() if waiting.peer_id != peer_id}

    def clear(self) -> None:
        """Forgets everyone: the group is gone."""
        self.pending.clear()
        self._stamped.clear()

    def _write_all(self, peer_id: str, request: StoreRequest) -> None:
        answer = Reply(request.number)
        if len(request.values) != _VALUES_PER_KEY[request.op] * len(request.keys):
            text = f"{request.op.value} with {len(request.keys)} keys and {len(request.values)} values"
            self._reply(peer_id, Reply(request.number, failure=Failure("StoreError", text)))
            return
        for place, key in enumerate(request.keys):
            stored = self._durable.store.get(key, _MISSING)
            stamp = next((s for s in stored.stamps if (s.peer_id, s.number) == (peer_id, request.number)), None)
            if stamp is None:
                try:
                    value, stamp = _changed(stored.value, peer_id, request, place)
                except ValueError as error:
                    text = f"{request.op.value} of key {key!r} in group {self._durable.name!r}: {error}"
                    answer = Reply(request.number, failure=Failure("StoreError", text))
                    break
                self._append(StoreWritten(self._durable.name, key, value, (*stored.stamps, stamp)))
                self._note(peer_id, request.number, key)
            answer = Reply(request.number, stamp.values, stamp.flag, stamp.amount)
        self._reply(peer_id, answer)

    def _wake(self) -> None:
        for key, pending in list(self.pending.items()):
            if self._serve(pending):
                del self.pending[key]

    def _serve(self, pending: Pending) -> bool:
        request = pending.request
        if not self._has_all(request.keys):
            return False
        wanted = request.keys if request.op is StoreOp.GET else ()
        values = tuple(value for key in wanted if (value := self._durable.store[key].value) is not None)
        answer = Reply(request.number, values)
        if sum(map(len, values)) > MAX_VALUE_BYTES:
            text = f"{len(values)} values of more than {MAX_VALUE_BYTES} bytes together: get them one by one"
            answer = Reply(request.number, failure=Failure("StoreError", text))
        self._reply(pending.peer_id, answer)
        return True

    def _has_all(self, keys: tuple[str, ...]) -> bool:
        return all(self._durable.store.get(key, _MISSING).value is not None for key in keys)

    def _note(self, peer_id: str, number: int, key: str) -> None:
        self._stamped.setdefault(peer_id, {}).setdefault(number, set()).add(key)

    def _forget(self, peer_id: str, below: int | None) -> None:
        numbers = self._stamped.get(peer_id, {})
        for number in [n for n in numbers if below is None or n < below]:
            for key in numbers.pop(number):
                self._strip(key, peer_id, number)
        if not numbers:
            self._stamped.pop(peer_id, None)

    def _strip(self, key: str, peer_id: str, number: int) -> None:
        stored = self._durable.store.get(key)
        if stored is None:
            return
        # Not journalled: a restart that finds an old stamp strips it again. Only a key's end is a record.
        stored.stamps = tuple(s for s in stored.stamps if (s.peer_id, s.number) != (peer_id, number))
        if stored.value is None and not stored.stamps:
            self._append(StoreWritten(self._durable.name, key, None))


def _changed(old: bytes | None, peer_id: str, request: StoreRequest, place: int) -> tuple[bytes | None, Stamp]:
    """The key's new value, and the answer to the one who changed it. Raises `ValueError` if it can't be done."""
    number = request.number
    match request.op:
        case StoreOp.SET:
            return _bounded(request.values[place]), Stamp(peer_id, number)
        case StoreOp.ADD:
            try:
                total = int(old or b"0") + request.amount
            except ValueError:
                raise ValueError(f"needs a decimal number, but the key holds {(old or b'')[:MAX_SHOWN]!r}") from None
            if abs(total) > MAX_SUM:
                raise ValueError(f"the sum does not fit into 64 bits: the key holds {(old or b'')[:MAX_SHOWN]!r}")
            return str(total).encode(), Stamp(peer_id, number, amount=total)
        case StoreOp.APPEND:
            return _bounded((old or b"") + request.values[place]), Stamp(peer_id, number)
        case StoreOp.DELETE:
            return None, Stamp(peer_id, number, flag=old is not None)
        case _:  # compare_set: as torch's, a missing key matches an empty expectation
            expected, desired = request.values
            matches = old == expected if old is not None else not expected
            new = _bounded(desired) if matches else old
            return new, Stamp(peer_id, number, values=(new if new is not None else expected,))


def _bounded(value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(
            f"a value of {len(value)} bytes is over the limit of {MAX_VALUE_BYTES}; "
            "send large values over the data plane, not through the master"
        )
    return value
