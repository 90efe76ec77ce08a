#!/usr/bin/env python3
"""Strikes one task of a cluster at a random moment, in every mode, and checks how all of them end.

    tests/chaos/run.py target/release/tftrain --rounds 10 --jobs 4

A round is every mode, role and blow once, in a shuffled order with a fixed seed. A third of the blows fall while the tasks
start. Where a mode lets the others go on they must make steps, and are then ended by SIGTERM to a living worker or client.
Ends with 1, and details, where anything happened that is not PROMISED.
"""
import argparse
import collections
import concurrent.futures
import itertools
import os
import random
import sys
import time

from cluster import PATIENCE, Cluster

# Family, then mode, parameter servers and workers.
MODES = {
    "ps-sync, 1 ps": ("ps-*", "ps-sync", 1, 2),
    "ps-sync, 2 ps": ("ps-*", "ps-sync", 2, 2),
    "ps-async": ("ps-*", "ps-async", 1, 2),
    "collective of 2": ("collective", "collective", 0, 2),
    "collective of 3": ("collective", "collective", 0, 3),
    "in-graph": ("in-graph", "in-graph", 0, 2),
    "in-graph, 1 ps": ("in-graph", "in-graph", 1, 2),
}
# A signal; INT2 is SIGINT twice within 30 ms, STOP is followed by SIGCONT, BACK is KILL and another start.
BLOWS = ["TERM", "INT", "INT2", "KILL", "STOP", "BACK"]
# Longer than two heartbeats.
SILENCE = 7
# Family, role, blow: how it may end once all have made steps. "it" is the struck task; "on": more steps were made, then SIGTERM.
ENDS = {
    ("*", "*", "TERM"): ["all 143"],
    ("*", "*", "INT"): ["all 130"],
    ("*", "*", "INT2"): ["all 130", "it 130, others 5", "it 130, others 130 5"],
    ("*", "*", "KILL"): ["it killed, others 5"],
    ("*", "*", "STOP"): ["all 5"],
    ("ps-*", "worker", "KILL"): ["on, it killed, others 143"],
    ("ps-*", "worker", "INT2"): ["all 130", "on, it 130, others 143"],
    ("ps-*", "worker", "STOP"): ["on, all 143"],
    ("ps-*", "worker", "BACK"): ["on, all 143"],
    ("*", "ps", "STOP"): ["on, all 143"],
    ("*", "ps", "BACK"): ["on, all 143"],
    ("in-graph", "chief", "STOP"): ["on, all 143", "all 5"],
    ("in-graph", "chief", "BACK"): ["on, all 143", "all 5"],
}
# Before all have made a step, also: some never came, or nothing was saved that could be restored, or signals were not yet heard.
EARLY = {"4", "5", "killed", "struck down", "130", "143"}


def promised(family, role, blow):
    """The row that says most."""
    role = "worker" if (family, role) == ("ps-*", "chief") else role
    keys = [(family, role, blow), ("*", role, blow), ("*", "*", blow)]
    return next((ENDS[key] for key in keys if key in ENDS), None)


def cases(rounds):
    for number in range(rounds):
        batch = []
        for mode, (family, _, ps, _) in MODES.items():
            for role in ["ps"] * bool(ps) + ["chief", "worker"]:
                batch += [(number, mode, role, blow) for blow in BLOWS if promised(family, role, blow)]
        random.Random(number).shuffle(batch)
        yield from batch


def hit(cluster, target, blow, moments):
    """The blow, and what follows it; returns when it fell."""
    at = time.monotonic()
    target.send({"INT2": "INT", "BACK": "KILL"}.get(blow, blow))
    if blow == "INT2":
        time.sleep(moments.uniform(0, 0.03))
        target.send("INT")
    if blow == "STOP":
        time.sleep(SILENCE)
        target.send("CONT")
    if blow == "BACK":
        target.end(at + PATIENCE)
        time.sleep(moments.uniform(0.1, 1.5))
        target.start(" --resume" if target is cluster.chief else "")
    return at


def go_on(cluster):
    """Whether all that live of those who make steps make some more; not where all end instead."""
    before = {task: task.lines() for task in cluster.steppers}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        living = [task for task in cluster.steppers if task.lives()]
        if not living:
            return False
        if all(task.lines() > before[task] + 10 for task in living):
            return True
        time.sleep(0.1)
    return False


def strike(program, case):
    number, mode, role, blow = case
    family, name, ps, workers = MODES[mode]
    moments = random.Random(str(case))
    cluster = Cluster(program, name, ps, workers)
    target = {"ps": cluster.ps[:1], "chief": [cluster.chief], "worker": cluster.workers[-1:]}[role][0]
    others = [task for task in cluster.tasks if task is not target]
    if moments.random() < 1 / 3:
        time.sleep(moments.uniform(0, 0.15))
    else:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not all(task.lines() > 1 for task in cluster.steppers):
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1))
    early = not all(task.lines() > 1 for task in cluster.steppers)
    saved = max(cluster.checkpoints(), default=0)
    at = hit(cluster, target, blow, moments)
    on = False
    # A signal before its task has met the others tells them nothing: they may go on.
    if early or blow not in ("TERM", "INT"):
        time.sleep(1)
        on = go_on(cluster)
        if on:
            next(task for task in cluster.steppers if task.lives()).send("TERM")
    deadline = time.monotonic() + PATIENCE
    own = str(target.end(deadline))
    rest = sorted({str(task.end(deadline)) for task in others})
    end = "on, " * on + (f"all {own}" if rest == [own] else f"it {own}, others {' '.join(rest)}")

    found, now = cluster.faults(), cluster.checkpoints()
    allowed = promised(family, role, blow)
    if not saved and (role, blow) == ("ps", "BACK"):
        allowed = allowed + ["all 5"]
    # It came back while others still held its place for a life that they had not begun to watch.
    refused = {"8"} if blow == "BACK" else set()
    if end not in allowed and not (early and {own, *rest} <= EARLY | refused):
        found.append("not promised")
    if on and (role, blow) == ("ps", "BACK") and max(now, default=0) <= saved:
        found.append(f"no step after {saved}")
    # Who hears a signal twice ends as if killed: a chief saves nothing, and nothing can be saved of such a ps.
    saves = cluster.chief.process.returncode in (130, 143) and (blow != "INT2" or role == "worker")
    if saves and cluster.steps() and max(now, default=0) <= cluster.steps()[-1]:
        found.append(f"not saved at the end: {sorted(now)}, steps to {cluster.steps()[-1]}")
    noticed = None
    if blow in ("KILL", "STOP", "BACK") and not early:
        words = [t - at for task in others for t, line in task.words if t > at and target.name in line]
        noticed = min(words, default=None)
    said = [f"    {task.name} {t - at:+.2f} {line}" for task in cluster.tasks for t, line in task.words if t > at]
    cluster.close()
    return (early, end, noticed, found, said)


def table(results):
    """What ended alike in one row; blows before all had made steps below, by blow alone."""
    groups, early = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
    for (_, mode, role, blow), (is_early, end, *_) in results:
        if is_early:
            early[blow][end] += 1
        else:
            groups[blow, MODES[mode][0], role][end] += 1
    rows = collections.defaultdict(list)
    for (blow, family, role), ends in groups.items():
        rows[blow, tuple(sorted(ends))].append((family, role, ends))
    print("| blow | struck | times | ended |\n|---|---|---|---|")
    for (blow, _), alike in sorted(rows.items(), key=lambda row: (BLOWS.index(row[0][0]), row[0][1])):
        struck = collections.defaultdict(set)
        for family, role, _ in alike:
            struck[family].add(role)
        struck = "; ".join(f"{family}: {', '.join(sorted(roles))}" for family, roles in sorted(struck.items()))
        row(blow, struck, sum((ends for *_, ends in alike), collections.Counter()))
    for blow in filter(early.get, BLOWS):
        row(blow, "before all had made steps", early[blow])
    print("\n| noticed by another task | struck | times | said nothing | median | longest |\n|---|---|---|---|---|---|")
    for blows, (family, role) in itertools.product((("KILL", "BACK"), ("STOP",)), sorted({key[1:] for key in groups})):
        times = [
            noticed
            for (_, mode, struck, blow), (is_early, _, noticed, *_) in results
            if blow in blows and not is_early and (MODES[mode][0], struck) == (family, role)
        ]
        spoke = sorted(time for time in times if time is not None)
        if spoke:
            middle, longest = spoke[len(spoke) // 2], spoke[-1]
            silent = len(times) - len(spoke)
            print(f"| {', '.join(blows)} | {family}: {role} | {len(times)} | {silent} | {middle:.2f} s | {longest:.2f} s |")


def row(blow, struck, ends):
    words = "; ".join(f"{end}: {times}" for end, times in ends.most_common())
    print(f"| {blow} | {struck} | {ends.total()} | {words if len(ends) > 1 else next(iter(ends))} |")


def main():
    parser = argparse.ArgumentParser(description="Strikes tasks of clusters at random moments.")
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="clusters at once")
    parser.add_argument("--minutes", type=float, default=1e6, help="no blow begins later")
    parser.add_argument("--only", default="", help="words that the mode, role and blow have, as in 'ps-async worker KILL'")
    args = parser.parse_args()
    wanted = [case for case in cases(args.rounds) if all(word in " ".join(case[1:]) for word in args.only.split())]
    deadline, results, wrong = time.monotonic() + 60 * args.minutes, [], 0

    def one(case):
        return strike(args.program, case) if time.monotonic() < deadline else None

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for case, result in zip(wanted, pool.map(one, wanted)):
            if not result:
                continue
            results.append((case, result))
            early, end, _, found, said = result
            if found:
                wrong += 1
                print("UNEXPECTED", *case, "| early" * early, "|", end, "|", *found, "\n" + "\n".join(said), flush=True)
    table(results)
    print(f"{len(results)} of {len(wanted)} blows, {wrong} with an unexpected end")
    sys.exit(bool(wrong))


main()
