"""The windows of a log, apart by server, engine and plain decode; which of them a diagnosis is about."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from labkit.engines.record import Record
from labkit.engines.server import Server


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
    """Groups by number of the launch, engine, and whether it is plain decode. ``server``: the one the reader fills."""
    found, chance, number = Groups(), random.Random(0), 0
    for record in records:
        server.version, server.model = server.version or record.engine_version, server.model or record.model
        group = found.setdefault((len(server.past), record.engine, record.plain), Group())
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
        elif (place := chance.randrange(group.count)) < limit:  # each window is as likely to stay as any other
            group.kept[place] = record
    return found


def judged(groups: Groups, server: Server) -> tuple[Group, bool, list[str]]:
    """The windows of the last server of the engine with most of them, whether they are plain, and what was left out.

    Makes ``server`` the one that they are of.
    """
    sizes = Counter[str]()
    for (_, engine, _), group in groups.items():
        sizes[engine] += group.count
    if not sizes:
        return Group(), False, []
    notes, (engine, _) = list[str](), sizes.most_common(1)[0]
    if others := [f"{name} ({count} windows)" for name, count in sizes.items() if name != engine and count]:
        notes.append(
            f"several engines in one log: {engine} has most windows and is judged, left out: {', '.join(others)}"
        )
    servers, own = [*server.past, server], {key: group for key, group in groups.items() if key[1] == engine}
    last = max((key[0] for key, group in own.items() if group.count or group.total), default=max(own)[0])
    same = [i for i, other in enumerate(servers) if other.facts() == servers[last].facts()]
    before = [group for key, group in own.items() if key[0] not in same and group.count]
    if before:
        number = len({key[0] for key, group in own.items() if key[0] not in same and group.count}) + 1
        places = ", ".join(f"{group.first}-{group.last}" for group in before)
        notes.append(f"the log holds {number} servers; the last one is judged, windows {places} belong to those before")
    mine = servers[last] if servers[last].engine in ("", engine) else Server(gpu=server.gpu)
    vars(server).update(vars(mine) | {"engine": engine})
    kinds = {
        plain: _joined([own[i, engine, plain] for i in same if (i, engine, plain) in own]) for plain in (False, True)
    }
    is_plain = bool(kinds[True].count) and not (kinds[False].count or kinds[False].total)
    if kinds[True].count and not is_plain:
        notes.append(f"{kinds[True].count} windows of plain decode were left out")
    return kinds[is_plain], is_plain, notes


def _joined(groups: list[Group]) -> Group:
    found = Group()
    for group in groups:
        found.kept, found.total = found.kept + group.kept, group.total or found.total
        found.count, found.warnings = found.count + group.count, found.warnings + group.warnings
    return found
