"""The command line: `zerolab setup | run | plan | doctor | calibrate | compare | bench` (also `python -m zerolab`)."""

from __future__ import annotations

import argparse
import json
import os
import re
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

    plan = commands.add_parser("plan", help="what a ds_config will do: collectives, memory, seconds, before anything runs")
    plan.add_argument("--config", type=Path, help="ds_config file (JSON or HJSON); default: DeepSpeed's stage-3 defaults in bf16")
    _add_case(plan)
    plan.add_argument("--json", action="store_true", help="the plan as JSON")

    doctor = commands.add_parser("doctor", help="a ds_config key by key: refused, inert, default, or what it costs and buys")
    doctor.add_argument("config", type=Path, help="ds_config file (JSON or HJSON)")
    _add_case(doctor)

    calibrate = commands.add_parser("calibrate", help="measure this machine's rates for `plan`: link, device, host")
    calibrate.add_argument("--out", type=Path, help="write machine.json here")
    calibrate.add_argument("--record", nargs="?", const="", metavar="MACHINE", help="keep it in labs/results/MACHINE")
    calibrate.add_argument("--world", type=int, help="number of ranks")
    calibrate.add_argument("--from-records", metavar="FOLDER", help="fit the host's costs to the runs recorded in labs/results/FOLDER")
    calibrate.add_argument("--rates", type=Path, help="with --from-records: the device's rates, from a calibration of one card")

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


def _add_case(parser) -> None:
    """The model, the cards and the batch that a config is judged with."""
    parser.add_argument("--model", default="qwen2.5-14b", help="a built-in name, a config.json of transformers, or a folder with one")
    parser.add_argument("--world", type=int, default=4, help="number of GPUs")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="rank of the adapters; 0 trains everything")
    parser.add_argument("--checkpointing", choices=("non-reentrant", "reentrant"), nargs="?", const="non-reentrant")
    parser.add_argument("--micro-batch", type=int, help="sequences a GPU and micro-step (default: the config's, else 1)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, help="micro-steps in a step (default: the config's, else 1)")
    parser.add_argument("--machine", default="h200-x2-nvlink", help="whose rates: a folder of labs/results, or a machine.json")
    parser.add_argument("--link", help="another link: nvlink, pcie-shm, gloo, bytes/s (6e9), a folder of labs/results, or a machine.json")
    parser.add_argument("--gpu-memory", metavar="16GiB", help="memory of one card: says whether it fits")
    parser.add_argument("--launcher", choices=("hf", "deepspeed"), default="hf", help="who resolves \"auto\" (DeepSpeed alone does not)")


def _case(options) -> dict:
    """Those options as words of `planning.plans`."""
    from zerolab import planning

    link = options.link and (float(options.link) if re.fullmatch(r"[\d.]+(e\d+)?", options.link) else options.link)
    words = ("model", "world", "lora", "checkpointing", "micro_batch", "seq", "accumulation", "machine", "launcher")
    memory = planning.size(options.gpu_memory) if options.gpu_memory else None
    return {**{word: getattr(options, word) for word in words}, "link": link, "gpu_memory": memory}


def _config(options) -> dict:
    config = userconfig.read(options.config) if options.config else {}
    if config and not (config.get("bf16") or config.get("fp16")):
        print("zerolab: no bf16 or fp16 section; planned in bf16 (DeepSpeed alone would train in fp32)", file=sys.stderr)
    return config


def _setup(options) -> int:
    return setup.main()


def _run(options) -> int:
    os.environ["ZEROLAB_COMMAND"] = "zerolab run " + " ".join(Path(w).name for w in options.what)
    if options.world:
        os.environ["ZEROLAB_WORLD"] = str(options.world)
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
            if options.record is not None:  # an experiment may ask for ranks of its own number
                os.environ["ZEROLAB_RESULTS"] = str(RESULTS / (options.record or machine.folder_name(experiment.world)))
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


def _plan(options) -> int:
    from zerolab import planning

    asked = {**_case(options), "config": _config(options)}
    found = planning.plans({"": asked}, progress=not options.json)[""]
    print(json.dumps(found, indent=1) if options.json else planning.describe(found))
    return 0


def _doctor(options) -> int:
    from zerolab import doctor

    found = doctor.examine(_config(options), **_case(options))
    print(doctor.describe(found))
    return int(any(finding.level == "refused" for finding in found))


def _calibrate(options) -> int:
    from zerolab import calibrate

    if options.from_records:
        return calibrate.from_records(options.from_records, options.rates)
    if options.record is not None:
        options.out = RESULTS / (options.record or machine.folder_name(options.world)) / "machine.json"
    return calibrate.main(options.out, options.world)


def _bench(options) -> int:
    from zerolab import bench

    return bench.main(options.which, options.out)


if __name__ == "__main__":
    sys.exit(main())
