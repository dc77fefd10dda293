"""The `shardwise` command: its verbs and their options."""

from typing import Annotated, Literal

import typer

from shardwise.cli.reported import reported

app = typer.Typer(
    name="shardwise",
    help="Distributed training for PyTorch that plans itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable.")
]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="Ranks to start, one a device.")]
Span = Annotated[
    str | None, typer.Option("--devices", metavar="N|LEAST:MOST", help="Ranks to start, one a device; 2:4 may shrink.")
]


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        typer.echo(f"shardwise {importlib.metadata.version('shardwise')}")
        raise typer.Exit


@app.callback()
def _shardwise(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: shardwise train recipes/quickstart.toml --set optimizer.lr=1e-4 --set train.steps=100")
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe.")],
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move a run that is there aside; start over.")] = False,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="NAME", help="A new run from the newest checkpoint.")
    ] = None,
    devices: Span = None,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="N|MIN:MAX", help="Of several; the same command on each of them."),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="Where they meet: one node's address.")
    ] = None,
    node_name: Annotated[
        str | None, typer.Option("--node-name", metavar="NAME", help="This one's name; else the machine's.")
    ] = None,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the command; start nothing.")] = False,
) -> None:
    """Plan, start the ranks, train a recipe's model, and resume: on this machine, or on several nodes."""
    from shardwise.cli import train as verb

    asked = verb.Asked(
        recipe, tuple(overrides or ()), fresh, fork, devices, as_json, dry_run, nodes, rendezvous, node_name
    )
    reported(lambda: verb.train(asked), as_json)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    epilog="Example: shardwise run --devices 2 train.py --epochs 3",
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Your Python script; its own arguments follow it.")],
    devices: Devices = None,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
    restarts: Annotated[
        int | None, typer.Option("--restarts", min=0, help="After so many crashes at most, start it again in any case.")
    ] = None,
) -> None:
    """Start a script of your own on the devices of this machine."""
    from shardwise.cli import run as verb

    asked = verb.Asked(script, tuple(context.args), devices, as_json, dry_run, restarts)
    reported(lambda: verb.run(asked), as_json)


@app.command(epilog="Example: shardwise plan llama-3-70b --cluster 8xp5.48xlarge -o plan.json --html plan.html")
def plan(
    target: Annotated[
        str, typer.Argument(help="A recipe (.toml), a config.json, a preset, or package.module:callable.")
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", help="local, 4x8xH100, 4xp5.48xlarge, 8xA100+8xL4, a cluster file.")
    ] = "",
    overrides: Overrides = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the best plan to this file.")] = None,
    as_json: AsJson = False,
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to tell.")] = 5,
    fixes: Annotated[
        list[str] | None, typer.Option("--fix", metavar="NAME=VALUE", help="tp=8, recompute=full, ...; repeatable.")
    ] = None,
    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="How much is trained: 15T, 2e9.")] = None,
    days: Annotated[float | None, typer.Option("--days", min=0.001, help="How many GPUs for --tokens in time.")] = None,
    price: Annotated[float | None, typer.Option("--price", min=0.0, help="Dollars for a GPU and hour.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="The largest batch, sequence and model that fit.")] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="List known GPUs and nodes, and do nothing else.")] = False,
) -> None:
    """Search all ways to split the work for the fastest that fits, and say why. No GPU and no torch needed."""
    if gpus:
        from shardwise.report import catalogue

        print(catalogue.as_json() if as_json else catalogue.text())
        return
    if not target:
        raise typer.BadParameter("give a recipe, a config.json, a preset or package.module:callable; or --gpus alone")
    from shardwise.cli import plan as verb
    from shardwise.cli.plan_answers import Wanted

    wanted = Wanted(tokens, days, price, largest)
    asked = verb.Asked(target, cluster, tuple(overrides or ()), output, as_json, top, tuple(fixes or ()), page, wanted)
    reported(lambda: verb.plan(asked), as_json)


@app.command(epilog="Example: shardwise verify recipes/quickstart.toml --half parity --set train.plan.zero=3 --json")
def verify(
    target: Annotated[str, typer.Argument(help="A plan (.json) or a recipe (.toml).")],
    overrides: Overrides = None,
    half: Annotated[
        str, typer.Option("--half", help="dry: fake ranks; parity: N small ranks and one process; both.")
    ] = "both",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile blocks in parity too, where the plan does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove a plan before GPU hours: bytes and collectives on fake ranks; N small ranks give what one process gives."""
    from shardwise.cli import verify as verb

    reported(lambda: verb.verify(verb.Asked(target, tuple(overrides or ()), half, compiled, as_json)), as_json)


@app.command(epilog="Example: shardwise doctor --measure -o cluster.toml")
def doctor(
    as_json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine's speed and write a cluster file, in about a minute."),
    ] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="The cluster file of --measure (cluster.toml).")
    ] = "",
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, max=100.0, help="About how long --measure measures.")
    ] = 60.0,
) -> None:
    """What is here, what works, and what is missing; with --measure, how fast it is."""
    if measure:
        from shardwise.cli import measure as probe

        reported(lambda: probe.measure(probe.Asked(output, as_json, seconds)), as_json)
    if output:
        raise typer.BadParameter("-o is the file of --measure: shardwise doctor --measure -o cluster.toml")
    from shardwise.cli import doctor as verb

    reported(lambda: verb.doctor(as_json), as_json)


checkpoints = typer.Typer(
    help="What checkpoints there are, whether they are whole, how they differ, what may go.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(checkpoints, name="checkpoints")
Place = Annotated[str, typer.Argument(help="A run's folder, a checkpoint's folder, or a URL of checkpoints.")]


@checkpoints.command("list", epilog="Example: shardwise checkpoints list runs/quickstart")
def list_checkpoints(target: Place, as_json: AsJson = False) -> None:
    """Step, when, world and plan, bytes, root, and whole, damaged or torn: by manifests and the files' ends."""
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.listed(target, as_json), as_json)


@checkpoints.command("verify", epilog="Example: shardwise checkpoints verify runs/quickstart --json")
def verify_checkpoints(target: Place, as_json: AsJson = False) -> None:
    """Every byte of every file against its digest, and the root made anew; no torch, no ranks."""
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.verify(target, as_json), as_json)


@checkpoints.command(epilog="Example: shardwise checkpoints ledger runs/quickstart")
def ledger(target: Place, as_json: AsJson = False) -> None:
    """Whether each sample was trained on once, over all attempts up to a checkpoint; else which came twice or never."""
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.ledger(target, as_json), as_json)


@checkpoints.command(epilog="Example: shardwise checkpoints diff runs/a runs/b/checkpoints/step-00000500-...")
def diff(before: Place, after: Place, as_json: AsJson = False) -> None:
    """Whether two checkpoints hold one state, whatever split saved them; else which tensors and values differ."""
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.diff(before, after, as_json), as_json)


@checkpoints.command(epilog="Example: shardwise checkpoints export runs/finetune my-model --dtype bf16")
def export(
    target: Place,
    out: Annotated[str, typer.Argument(help="A new folder.")],
    like: Annotated[
        str | None, typer.Option("--like", help="The folder of the model that was trained: config and tokenizer.")
    ] = None,
    dtype: Annotated[
        Literal["saved", "fp32", "bf16", "fp16"], typer.Option("--dtype", help="Of the weights.")
    ] = "saved",
    merged: Annotated[bool, typer.Option("--merged", help="Adapters added to the weights, in place of alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights, saved under any split, as a folder that Hugging Face's from_pretrained loads.

    Of a model that was trained with adapters, the adapters alone, as peft loads them.
    """
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.exported(target, out, like, dtype, merged, as_json), as_json)


@checkpoints.command(epilog="Example: shardwise checkpoints prune runs/quickstart --keep 2 --dry-run")
def prune(
    target: Place,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="The newest so many, in place of checkpoint.keep.")
    ] = None,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")] = False,
) -> None:
    """Delete what the run's policy no longer keeps; pinned and best ones stay, and the newest is read back before."""
    from shardwise.cli import checkpoints as verb

    reported(lambda: verb.prune(target, keep, as_json, dry_run), as_json)


@checkpoints.command("resume-check", epilog="Example: shardwise checkpoints resume-check runs/quickstart --steps 20")
def resume_check(
    target: Place,
    begin: Annotated[int | None, typer.Option("--from", min=0, help="The step of the checkpoint to begin at.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="How many steps at most.")] = None,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained again; start nothing.")] = False,
) -> None:
    """Train again from an earlier checkpoint: losses, norms and root must be what the run recorded, to the bit."""
    from shardwise.cli import resume_check as verb

    reported(lambda: verb.resume_check(verb.Asked(target, begin, steps, as_json, dry_run)), as_json)


dev = typer.Typer(help="For those who test Shardwise itself.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(dev, name="dev")


@dev.command(epilog="Example: shardwise dev score runs.csv --json")
def score(
    runs: Annotated[str, typer.Argument(help="A CSV of measured runs, a line each.")],
    as_json: AsJson = False,
) -> None:
    """How far the predicted step time and memory are from measured runs. docs/guides/score.md has the columns."""
    from shardwise.cli import dev as verb

    reported(lambda: verb.score(runs, as_json), as_json)


@dev.command(epilog="Example: shardwise dev chaos recipes/quickstart.toml --faults 20 --devices 2")
def chaos(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe; it is trained in a scratch folder, twice.")],
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option("--faults", min=1, help="How many faults, one after another.")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed draws the same faults.")] = 0,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help='"kill rank", "flip bit", ...; repeatable.')
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Ranks of the scratch run.")] = 2,
    store: Annotated[
        Literal["disk", "s3"],
        typer.Option("--store", help="Its checkpoints: in its folder, or in an S3 store of its own, on loopback."),
    ] = "disk",
    out: Annotated[
        str, typer.Option("--out", metavar="FOLDER", help="The scratch folder; it must be new.")
    ] = "runs/chaos",
    as_json: AsJson = False,
) -> None:
    """Let faults loose on a scratch run (kills, stops, flipped bits, a bad disk or store) and say what was survived."""
    from shardwise.cli import chaos as verb

    asked = verb.Asked(recipe, tuple(overrides or ()), faults, seed, tuple(kinds or ()), devices, store, out, as_json)
    reported(lambda: verb.chaos(asked), as_json)


def main(arguments: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 bad input, 75 requeue, 130 stopped by Ctrl-C.

    Raises: SystemExit, always.
    """
    app(arguments)
