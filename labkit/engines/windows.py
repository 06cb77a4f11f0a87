"""The windows of a log, apart by server, engine and plain decode; which of them a diagnosis is about."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from labkit.engines.record import Record
from labkit.engines.server import Server

_FACTS = attrgetter("version", "model", "args", "named")  # what makes it another server than one before


@dataclass
class Group:
    """Windows of one kind, thinned at random; ``first`` and ``last``: their numbers in the log, from 1."""

    kept: list[Record] = field(default_factory=list)
    total: list[Record] = field(default_factory=list)  # the last value since the start of the server
    count: int = 0
    first: int = 0
    last: int = 0
    warnings: Counter[str] = field(default_factory=Counter)


Groups = dict[tuple[int, str, bool], Group]


def grouped(records: Iterable[Record], server: Server, limit: int) -> Groups:
    """Groups by number of the server, engine, and whether it is plain decode. ``server``: the one the reader fills."""
    found, chance, number, changes, place = Groups(), random.Random(0), 0, -1, 0
    for record in records:
        server.version, server.model = server.version or record.engine_version, server.model or record.model
        if server.changes != changes:  # launched again with the same arguments it is the same server
            changes, same = server.changes, [_FACTS(other) == _FACTS(server) for other in server.past]
            place = [*same, True].index(True)
        group = found.setdefault((place, record.engine, record.plain), Group())
        group.warnings.update(record.warnings)
        if record.mean_acceptance_length is None:
            continue
        if record.scope == "since_start":  # the same steps as its windows, which tell more
            group.total = [record]
            continue
        number, group.count = number + 1, group.count + 1
        group.first, group.last = group.first or number, number
        if group.count <= limit:
            group.kept.append(record)
        elif (index := chance.randrange(group.count)) < limit:  # each window is as likely to stay as any other
            group.kept[index] = record
    return found


def judged(groups: Groups, server: Server) -> tuple[Group, bool, list[str]]:
    """Windows of the last server of the main engine (``server`` becomes it), are they plain, and what was left out."""
    sizes, notes = Counter[str](), list[str]()
    for (_, name, _), group in groups.items():
        sizes[name] += group.count
    if not sizes:
        return Group(), False, notes
    engine = sizes.most_common(1)[0][0]
    if others := [f"{name} ({count} windows)" for name, count in sizes.items() if name != engine and count]:
        notes.append(f"several engines: {engine} has most windows and is judged; left out: {', '.join(others)}")
    own = {key: group for key, group in groups.items() if key[1] == engine}
    place = max(own, key=lambda key: (own[key].last, bool(own[key].total), key[0]))[0]
    if before := {key: group for key, group in own.items() if key[0] != place and group.count}:
        count, spans = len({key[0] for key in before}) + 1, ", ".join(f"{g.first}-{g.last}" for g in before.values())
        notes.append(f"the log holds {count} servers; the last one is judged; windows {spans} belong to those before")
    mine = [*server.past, server][place]
    mine = mine if mine.engine in ("", engine) else Server(gpu=server.gpu)
    vars(server).update(vars(mine) | {"engine": engine})
    plain, drafted = (own.get((place, engine, is_plain), Group()) for is_plain in (True, False))
    if drafted.count or drafted.total or not plain.count:
        return drafted, False, notes + [f"{plain.count} windows of plain decode were left out"] * bool(plain.count)
    return plain, True, notes
