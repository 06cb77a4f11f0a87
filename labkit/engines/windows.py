"""The windows of a log, apart by server, engine and plain decode; which of them a diagnosis is about."""

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import Any

from labkit.engines.record import Record
from labkit.engines.server import Server

# SGLang sets its limit of running requests by itself where it drafts.
_DRAFTS = re.compile("spec|draft|^method$|prompt_lookup|suffix|synth|rejection|max_running|(?i:simulate|force_num)")
UNLIKE = 1.1  # ratio of two ranks' lengths that is told
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


@dataclass
class Judged:
    """What a diagnosis is about: the windows, whether they are plain, plain ones of the same server, what to say."""

    group: Group
    is_plain: bool = False
    plain: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judged(groups: Groups, server: Server) -> Judged:
    """Windows of the last server of the main engine; ``server`` becomes it.

    A server that was launched with other speculation, or none, and is the same otherwise is that server too.
    """
    sizes, notes = Counter[str](), list[str]()
    for (_, name, _), group in groups.items():
        sizes[name] += group.count
    if not sizes:
        return Judged(Group())
    engine = sizes.most_common(1)[0][0]
    if others := [f"{name} ({count} windows)" for name, count in sizes.items() if name != engine and count]:
        notes.append(f"several engines: {engine} has most windows and is judged; left out: {', '.join(others)}")
    own = {key: group for key, group in groups.items() if key[1] == engine}
    servers = [*server.past, server]
    by_time = sorted(own, key=lambda key: (own[key].last, bool(own[key].total), key[0]))
    kin = {key[0] for key in by_time if _but_drafts(servers[key[0]]) == _but_drafts(servers[by_time[-1][0]])}
    drafted = [key for key in by_time if key[0] in kin and not key[2] and (own[key].count or own[key].total)]
    place = (drafted or by_time)[-1][0]
    plain = [key for key in by_time if key[2] and key[0] in kin and own[key].count]
    kin = {place, *(key[0] for key in plain)}
    if before := {key: group for key, group in own.items() if key[0] not in kin and group.count}:
        count = len({key[0] for key in before}) + 1
        spans = ", ".join(f"{group.first}-{group.last}" for group in before.values())
        notes.append(f"the log holds {count} servers; the last one is judged; windows {spans} belong to those before")
    mine = servers[place] if servers[place].engine in ("", engine) else Server(gpu=server.gpu)
    vars(server).update(vars(mine) | {"engine": engine})
    if plain and not drafted:
        return Judged(own[place, engine, True], True, notes=notes)
    base = [record for key in plain for record in own[key].kept]
    if plain:
        launches = ", also of launches that differ in speculation only," if kin != {place} else ""
        notes.append(f"{len(base)} windows of plain decode{launches} are the baseline")
    group = own.get((place, engine, False), Group())
    return Judged(group, False, base, notes + unlike_ranks(group.kept))


def unlike_ranks(windows: Iterable[Record]) -> list[str]:
    """A sentence where the ranks of one server yield other lengths, which are pooled; empty where they agree."""
    by_rank: dict[str, list[float]] = {}
    for window in windows:
        if window.details.get("rank") and window.mean_acceptance_length is not None:
            by_rank.setdefault(str(window.details["rank"]), []).append(window.mean_acceptance_length)
    means = {rank: fmean(lengths) for rank, lengths in sorted(by_rank.items())}
    if len(means) < 2 or max(means.values()) < UNLIKE * min(means.values()):
        return []
    shown = ", ".join(f"{rank} {mean:.2f}" for rank, mean in means.items())
    return [f"the ranks' lengths differ ({shown}); they are pooled"]


def _but_drafts(server: Server) -> tuple[Any, ...]:
    """The facts of a server without those of its speculation."""
    args = {name: text for name, text in server.args.items() if not _DRAFTS.search(name)}
    named = {name: text for name, text in server.named.items() if not name.startswith("draft")}
    return server.version, server.model, args, named
