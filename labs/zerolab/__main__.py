"""The command line: `zerolab setup | run | compare | bench` (also `python -m zerolab`)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerolab import lab, machine, setup, userconfig
from zerolab.experiment import ZerolabError
from zerolab.ranks import RanksError, shutdown
from zerolab.report import RESULTS, Report, compare


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zerolab", description="Measure, watch and predict DeepSpeed ZeRO-3.")
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("setup", help="check this machine and compile DeepSpeed's extension once")

    run = commands.add_parser("run", help="run a lab's experiment (05), all of them, or a ds_config of your own")
    run.add_argument("what", nargs="+", help="lab numbers, `all`, or a ds_config file")
    run.add_argument("--record", nargs="?", const="", metavar="MACHINE", help="keep the result in labs/results/MACHINE")
    run.add_argument("--world", type=int, help="number of ranks")
    run.add_argument("--out", type=Path, help="write the result here (one config file only)")

    comparison = commands.add_parser("compare", help="two result files side by side")
    comparison.add_argument("a", type=Path)
    comparison.add_argument("b", type=Path)

    bench = commands.add_parser("bench", help="the course's own figures: start-up, lab times, A/A, overhead")
    bench.add_argument("which", nargs="*", help="benchmarks to run (default: all)")
    bench.add_argument("--out", type=Path, default=Path("_build/bench.json"))

    options = parser.parse_args(arguments)
    try:
        return globals()[f"_{options.command}"](options)
    except (ZerolabError, RanksError) as error:
        print(f"zerolab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("zerolab: interrupted; what was measured until now is kept", file=sys.stderr)
        return 130
    finally:
        shutdown()


def _setup(options) -> int:
    return setup.main()


def _run(options) -> int:
    os.environ["ZEROLAB_COMMAND"] = "zerolab run " + " ".join(Path(w).name for w in options.what)
    if options.world:
        os.environ["ZEROLAB_WORLD"] = str(options.world)
    if options.record is not None:
        os.environ["ZEROLAB_RESULTS"] = str(RESULTS / (options.record or machine.folder_name()))
    print(machine.tier_line())
    failed = 0
    for what in list(lab.files()) if options.what == ["all"] else options.what:
        if Path(what).is_file():
            found = [userconfig.experiment(userconfig.read(what), Path(what).stem)]
        elif what.isdigit():
            found = lab.experiments(what)
        else:
            raise ZerolabError(f"{what}: neither a lab's number nor a file")
        for experiment in found:
            report = experiment.run(save=options.out or True)
            print_report(report)
            failed += all(not v.ok for v in report)
    return 1 if failed else 0


def print_report(report: Report):
    """A report as plain text."""
    print(f"\n{report.name}  ({report.line})")
    width = max(len(n) for n in report.variants)
    for v in report:
        if not v.ok:
            print(f"  {v.name:<{width}}  {v.status}: {v.message}")
            continue
        parts = []
        if v.data.get("collectives"):
            gathers = " + ".join(str(v.count("all_gather", p)) for p in ("forward", "backward", "step"))
            parts.append(f"all-gathers {gathers}, reduce-scatters {v.count('reduce_scatter')}")
        if v.data.get("resident"):
            parts.append(f"peak resident {v.peak_resident:,} elements")
        if v.times():
            ratio = f" {report.ratio(v.name)}" if v.name != report.base and report[report.base].times() else ""
            parts.append(f"{v.seconds():.3f} s a step{ratio}")
        print(f"  {v.name:<{width}}  {'; '.join(parts)}")


def _compare(options) -> int:
    try:
        a, b = Report.load(options.a), Report.load(options.b)
    except (OSError, ValueError, KeyError) as error:
        raise ZerolabError(f"not a result file: {error}") from None
    print(f"A: {a.name}, {a.line}\nB: {b.name}, {b.line}")
    rows = compare(a, b)
    if not rows:
        raise ZerolabError("the two have no variant in common")
    for row in rows:
        same = {True: "same collectives", False: "collectives differ", None: "collectives not recorded"}[row["counts_equal"]]
        left, right = (str(r) if r else "not timed" for r in row["ratio"])
        print(f"  {row['variant']}: {same} {row['collectives']}; time ÷ first variant: A {left}, B {right}")
    return 0


def _bench(options) -> int:
    from zerolab import bench

    return bench.main(options.which, options.out)


if __name__ == "__main__":
    sys.exit(main())
