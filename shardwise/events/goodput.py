"""Goodput: of a run's time, what went into steps that are part of its result, and where the rest went.

From the first attempt's start on. `useful`: steps that were kept, and evaluations. `replayed`: steps that were made and
lost, so made again. `restarting`: from an attempt's end to the next one's first step, and the first one's way to its
first step. `stalled`: the rest: saves, waiting for data, the loop's body. A pause that somebody chose (Ctrl-C, a
finished run that goes on) is in none.
"""

from collections.abc import Iterable, Sequence

from shardwise.errors import EXIT_DONE, EXIT_INTERRUPTED
from shardwise.events.values import AnyEvent, Evaluated, Goodput, RolledBack, RunStarted, Step, Stopped


def goodput(attempts: Sequence[Sequence[AnyEvent]]) -> Goodput | None:
    """Of the attempts' events, oldest attempt first; None before a first step."""
    steps: dict[int, float] = {}
    useful = replayed = restarting = total = 0.0
    lost = made = 0
    ended: float | None = None
    for events in attempts:
        began = next((event for event in events if isinstance(event, RunStarted)), None)
        if began is None:
            continue
        made += 1
        since = began.time if ended is None else min(ended, began.time)
        for event in events:
            if isinstance(event, RunStarted | RolledBack):
                gone = [number for number in steps if number > event.step]
                replayed += sum(steps.pop(number) for number in gone)
                lost += len(gone)
            elif isinstance(event, Step):
                steps[event.step] = event.step_seconds
            elif isinstance(event, Evaluated):
                useful += event.seconds or 0.0
        last = max(event.time for event in events)
        first = next((event for event in events if isinstance(event, Step)), None)
        restarting += max(0.0, (last if first is None else first.time - first.step_seconds) - since)
        total += last - since
        ended = None if _chosen(events) else last
    if not made or not (steps or replayed):
        return None
    useful += sum(steps.values())
    # Clocks that were set back between attempts must not give a negative part.
    stalled = max(0.0, total - useful - replayed - restarting)
    return Goodput(
        useful=useful, replayed=replayed, stalled=stalled, restarting=restarting, attempts=made, lost_steps=lost
    )


def _chosen(events: Iterable[AnyEvent]) -> bool:
    """Whether the attempt ended because somebody wanted it to."""
    stopped = [event for event in events if isinstance(event, Stopped)]
    return bool(stopped) and stopped[-1].exit_code in (EXIT_DONE, EXIT_INTERRUPTED)
