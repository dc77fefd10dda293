"""The Trainer: one loop, read top to bottom in `run`."""

import contextlib
import dataclasses
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import nn

from shardwise import ranks
from shardwise.checkpoint import background
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.completeness import Completeness, refuse, split_declared
from shardwise.checkpoint.interval import Interval, record_of
from shardwise.data.batches import as_data
from shardwise.data.loader import seed_generators
from shardwise.data.micros import Micros
from shardwise.data.order import seed_of
from shardwise.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    RecipeError,
    ShardwiseError,
    TrainingFailed,
)
from shardwise.events.values import Event
from shardwise.inputs.recipe import CheckpointPolicy, PlanRequest, Recipe, TrainableSpec
from shardwise.launch import run_folder
from shardwise.launch.heartbeat import AFTER, BEFORE, HEART
from shardwise.launch.run_folder import RunState
from shardwise.optimizer import build as optimizers
from shardwise.optimizer.schedules import Schedule
from shardwise.parallel.parallelize import parallel_of, parallelize, refuse_mixing
from shardwise.plan.plan import Plan
from shardwise.profiling import memory_use, probe
from shardwise.resilience import watchdog
from shardwise.resilience.guards import Guards
from shardwise.resilience.leaving import in_order
from shardwise.resilience.signals import StopSignals
from shardwise.train import before_ranks, failure, opening, setup, storing
from shardwise.train.additive import require_additive
from shardwise.train.before_ranks import Built
from shardwise.train.evaluate import Evaluation, evaluate
from shardwise.train.failure import WHERE
from shardwise.train.health import Bad, Health, Seen
from shardwise.train.journal import Journal
from shardwise.train.keeping import Keeping
from shardwise.train.loss import LossFunction
from shardwise.train.reading import Reading
from shardwise.train.scaler import LossScaler
from shardwise.train.step import (
    Inputs,
    StepLoss,
    Work,
    accumulate,
    agree,
    call_inputs,
    clip_factor,
    divisor,
    local_gradients,
    scale_gradients,
    squares,
)
from shardwise.train.stopping import Asked, Asking, Stopping, expected
from shardwise.train.stopping import flags as signal_flags


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer update, as the loop's body sees it: the same on every rank but `is_main`."""

    number: int
    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float]
    losses: Mapping[str, float]
    samples: int
    epoch: int
    is_main: bool
    applied: bool = True


class Trainer:
    """Trains a module under a plan; `for step in trainer.run(steps=...)` is one optimizer update each.

    `model`: a function that builds it, a module, or "hf:owner/name" or a folder that save_pretrained wrote: a causal
    language model of transformers, of whose weights each rank reads what it holds; `trainable` is for these:
    {"lora": {"rank": 8}} or {"frozen": ["model.embed_tokens.*"]}.

    The keywords are a Recipe's keys; `loss(outputs, batch)` returns sw.Loss(total, count). The same command again goes
    on where the run stands. Collective: every rank makes the same calls.

    Raises: BadInput before anything is trained; TrainingFailed while it runs.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module | str,
        *,
        loss: LossFunction,
        data: Any,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        global_batch: int | None = None,
        tokens_per_step: int | None = None,
        micro_batch: int | str = "auto",
        blocks: str = "auto",
        inputs: Inputs | str = "auto",
        schedule: Schedule | Callable[[int], float] | None = None,
        valid: Any = None,
        evaluate_every_steps: int = 0,
        precision: str = "auto",
        clip_norm: float | None = 1.0,
        seed: int = 0,
        plan: str | PlanRequest | Mapping[str, Any] | Plan = "auto",
        run: str | Path | None = None,
        fresh: bool = False,
        checkpoint: CheckpointPolicy = CheckpointPolicy(),  # noqa: B008 (a frozen value)
        state: Mapping[str, Any] | None = None,
        log: Sequence[str] = (),
        fp32_modules: Sequence[str] = (),
        sync_batchnorm: bool = False,
        mixes_samples: str = "refuse",
        unused_parameters: Sequence[str] = (),
        roles: Mapping[str, str] | None = None,
        sequence_parallel: str | bool = "auto",
        guard_every_steps: int = 100,
        on_spike: str = "tell",
        hang_seconds: float = 60.0,
        cluster: str = "local",
        trainable: str | TrainableSpec | Mapping[str, Any] = "full",
    ) -> None:
        WHERE.phase = "setup"
        failure.install()
        self.data = as_data(data)
        self.valid = None if valid is None else as_data(valid)
        settings = setup.Settings(
            model=setup.describe(model), data=setup.describe(data), blocks=blocks, global_batch=global_batch,
            tokens_per_step=tokens_per_step, tokens_per_sample=getattr(self.data, "tokens_per_sample", None),
            micro_batch=micro_batch, precision=precision, clip_norm=clip_norm, seed=seed, plan=plan,
            run=setup.run_name(run), checkpoint=checkpoint, log=tuple(log), fp32_modules=tuple(fp32_modules),
            evaluate_every_steps=evaluate_every_steps, sync_batchnorm=sync_batchnorm, mixes_samples=mixes_samples,
            unused_parameters=tuple(unused_parameters), roles=roles or {}, sequence_parallel=sequence_parallel,
            guard_every_steps=guard_every_steps, on_spike=on_spike, hang_seconds=hang_seconds, cluster=cluster,
            trainable=trainable,
        )  # fmt: skip
        self.loss, self.inputs = loss, inputs
        self.state, self.spared = split_declared(state or {})
        recipe, made = settings.recipe(), plan if isinstance(plan, Plan) else None
        built = before_ranks.before_joining(model, recipe, made, self.data, inputs)
        self.device = ranks.start()
        self._open(recipe, made, model, fresh, built)
        self._take(optimizer(self.model))
        setup.require_optimizer(self.optimizer, self.model, self.plan.decision)
        self.schedule = schedule
        WHERE.phase = BEFORE

    def _open(self, recipe: Recipe, plan: Plan | None, model: Any, fresh: bool, built: Built | None = None) -> None:
        self.fresh = fresh
        WHERE.folder = Path(recipe.run)
        if not watchdog.why_not(recipe.train.hang_seconds):
            watchdog.begin(WHERE.folder, recipe.train.hang_seconds, setup.stop_budget(recipe).seconds)
        # What the loop's own body draws is the same on every rank and in every run of this seed.
        seed_generators(seed_of(recipe.seed, "loop"))
        setup.require_documents_apart(model, self.data)
        module, initialize = (built.module, None) if built is not None else setup.build_model(model, recipe)
        setup.require_vocabulary(module, self.data)
        self.plan = setup.obeying(plan, recipe) if plan is not None else setup.make_plan(recipe, module)
        setup.require_proved(model, module, self.plan.decision)
        self.inputs = call_inputs(module, setup.inputs_of(model, self.inputs))
        self.not_probed, self.not_tried = "", built.not_tried if built is not None else ""
        if built is None and initialize is None:
            self.not_tried = before_ranks.rehearsed(module, self.plan.decision, recipe, self.data, self.inputs)
        if isinstance(model, str):
            self.not_probed = "a Hugging Face model's weights are read when it is split already"
        if initialize is None:
            refuse_mixing(module, recipe.model)
            self.not_probed = require_additive(module, self.loss, self.inputs, self.data, recipe.model, recipe.seed)
        if recipe.train.evaluate_every_steps and self.valid is None:
            raise RecipeError(
                f"evaluate_every_steps = {recipe.train.evaluate_every_steps}, and there is nothing to evaluate on.",
                fix="give valid= (data.valid_fraction in a recipe), or leave evaluate_every_steps out",
            )
        self.model = parallelize(
            module, self.plan, blocks=recipe.model.blocks, initialize=initialize,
            vocabulary_loss=getattr(self.loss, "takes_vocabulary_shards", False),
        )  # fmt: skip
        self.parallel = parallel_of(self.model)
        self.scaler = LossScaler(self.plan.decision.precision == "fp16")
        clip = recipe.optimizer.clip_norm
        self.clip_norm = None if isinstance(clip, str) else clip
        self.number = 0
        self.opened = False
        self.sample: Callable[[], str | None] = lambda: None

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # Before any schedule or checkpoint touches them: a changed learning rate takes effect on resume.
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    @classmethod
    def from_recipe(cls, recipe: Recipe, plan: Plan | None = None, *, fresh: bool = False) -> "Trainer":
        """The Trainer of a recipe: its preset's decoder, token data, optimizer and schedule. Collective."""
        trainer = cls.__new__(cls)
        WHERE.phase = "setup"
        failure.install()
        trainer.device = ranks.start()
        trainer.data, trainer.valid = setup.recipe_data(recipe)
        trainer.loss, trainer.inputs, trainer.state, trainer.spared = setup.next_token_loss, "auto", {}, []
        trainer._open(recipe, plan, setup.recipe_model(recipe), fresh)
        trainer._take(optimizers.build(recipe.optimizer, trainer.model))
        trainer.schedule = optimizers.schedule(recipe.optimizer.schedule)
        WHERE.phase = BEFORE
        return trainer

    # ------------------------------------------------------------------ the loop

    def run(
        self, steps: int | None = None, *, epochs: int | None = None, tokens: float | None = None
    ) -> Iterator[Step]:
        """Train to the end, one Step an optimizer update; resumes, saves and evaluates by itself.

        Leaving the loop with `break` saves. SIGINT and SIGTERM save at the next step boundary and leave through
        SystemExit (130, 75). Collective.
        """
        recipe = setup.with_end(self.plan.recipe, steps, epochs, tokens)
        total = setup.total_steps(recipe, self.data, self.plan.decision.global_batch)
        with contextlib.ExitStack() as held:
            held.callback(HEART.phase, AFTER)
            WHERE.phase = "setup"
            opened = opening.open_run(held, recipe, fresh=self.fresh)
            self.kept = storing.open_store(held, recipe, opened, fresh=self.fresh)
            self.fresh = False  # a second run() of this Trainer goes on with the first one's run
            self.stopping = Stopping(setup.stop_budget(recipe), WHERE, self._steps_kept, self._say)
            held.callback(self.stopping.end)
            self.signals = held.enter_context(StopSignals(self.stopping.begin))
            held.callback(setattr, self, "signals", None)
            if opened.finished:
                # What the script does after its loop, evaluate() say, is done with the weights that the run ended with.
                self._prepare(recipe, total, opened)
                self.reading.close()
                opening.say_finished(opened)
                return
            yield from self._run(recipe, total, opened)

    def _run(self, recipe: Recipe, total: int, opened: RunState) -> Iterator[Step]:
        self._prepare(recipe, total, opened)
        if asked := Asking(self.signals).now():
            self._leave(asked)
        if self.number == 0 and recipe.train.evaluate_every_steps:
            self.evaluate()
        WHERE.phase = "data"
        try:
            # Stopped after its last step, a run has nothing to train and still is to be finished.
            for micros in self.reading.steps() if self.number < total else ():
                step = self._step(micros)
                if step is None:
                    break
                yield step
                if self._after(step.number, total):
                    break
                WHERE.phase = "data"
            self._finish(total)
        except GeneratorExit:
            # `break` in the caller's loop keeps what was trained; after an exception the other ranks are not here.
            if in_order(__file__):
                self.keeping.finish(self.number, "left the loop")
                self._compare()
                self.journal.stopped(self.number, "user", EXIT_DONE)
            raise
        except ShardwiseError:
            background.leave()  # What the ranks agree to fail on may not cost a save that is nearly there.
            raise
        except (RuntimeError, MemoryError) as error:
            if failure.is_out_of_memory(error):
                raise failure.out_of_memory(error, self.plan.decision) from error
            raise
        finally:
            self.reading.close()

    def _step(self, micros: Micros) -> Step | None:
        """One update; None where the ranks agreed to stop before it."""
        started = time.perf_counter()
        number = self.number + 1
        WHERE.step = number
        self.optimizer.zero_grad(set_to_none=True)
        work = Work(self.model, list(micros), self.loss, self.inputs, number, self.scaler.scale)
        try:
            sums = accumulate(self.parallel, work)
        finally:
            WHERE.phase = work.phase
        gradients = local_gradients(self.parallel)
        flags = bool(self._stop_reason), *self.keeping.wants, *signal_flags(self.signals)
        read = self.reading.sums(micros, self.parallel.speaks)
        outcome, extra = agree(self.parallel, sums, [squares(self.parallel), *map(float, (*flags, *read))])
        self._stop_agreed, self._save_agreed, self._save_pending, *told = (count > 0 for count in extra[1:6])
        self._asked = Asked(*told)
        self.reading.require_once(micros, extra[6:])
        if self._stop_agreed and self.reading.drop(micros):
            return None
        norm = math.sqrt(extra[0]) / (divisor(outcome) * self.scaler.scale)
        applied = self._update(outcome, norm, gradients, number)
        self.number = number
        self.reading.trained(number, micros)
        overflow = not applied and self.scaler.enabled and outcome.finite
        seen = Seen(number, micros.first, micros.next_position, outcome.loss, norm, applied, overflow)
        self.bad = self.health.look(seen)
        lr = float(self.optimizer.param_groups[0]["lr"])
        step = Step(number, outcome.loss, norm, lr, outcome.metrics, outcome.losses, micros.samples, micros.epoch,
                    ranks.is_main(), applied)  # fmt: skip
        self.journal.step(number, outcome.loss, norm, lr, dict(outcome.metrics), micros.samples, micros.next_position,
                          time.perf_counter() - started)  # fmt: skip
        if self.guards.due(number):
            WHERE.phase = "guard"
            # What is not finite has no bits to agree on.
            alike = {"loss": outcome.loss, "gradient norm": norm} if applied else {}
            divided = work.divisors or dict.fromkeys(outcome.losses, divisor(outcome))
            self.guards.check(number, counted=sums.counts(), divided=divided, alike=alike)
        WHERE.phase = "loop body"
        return step

    def _update(self, outcome: StepLoss, norm: float, gradients: list[torch.Tensor], number: int) -> bool:
        """Scale, clip and apply, unless something is not finite; the same decision on every rank."""
        finite = outcome.finite and math.isfinite(norm)
        scale = self.scaler.scale
        self.scaler.update(finite)
        if not finite:
            return False
        scale_gradients(gradients, clip_factor(norm, self.clip_norm) / (divisor(outcome) * scale))
        WHERE.phase = "optimizer"
        optimizers.apply_schedule(self.optimizer, self.base_lrs, self.factor(number))
        self.optimizer.step()
        return True

    def _go_back(self, bad: Bad) -> None:
        """To the newest checkpoint from before `bad`; later ones are passed over from now on. Collective.

        Raises: CheckpointError where there is none.
        """
        undone = self.number
        self.number = WHERE.step = self.keeping.go_back(bad.since.step, bad.why)
        self.health.returned(bad)
        self.bad = None
        over = self.reading.pass_over(bad) if self.health.on_spike == "pass_over" else 0
        self.reading.resumed()
        self.journal.rolled_back(self.number, undone, str(self.checkpointer.resumed_from), bad.why, over)

    def _after(self, number: int, total: int) -> bool:
        """What is due after the loop's body; True where the loop ends here."""
        every = self.plan.recipe.train.evaluate_every_steps
        if every and number % every == 0 and number < total:
            self.evaluate()
        if self._asked:
            self._leave(self._asked)
        if self.bad is not None:
            self._go_back(self.bad)
            return False
        self.keeping.after(number, asked=self._save_agreed, pending=self._save_pending, last=number >= total)
        return number >= total or self._stop_agreed

    def _leave(self, asked: Asked) -> NoReturn:
        """After a signal on any rank: save what is new, and end this process. Collective. Raises: SystemExit."""
        code, name = (EXIT_INTERRUPTED, "SIGINT") if asked.interrupted else (EXIT_REQUEUE, "SIGTERM")
        trained, kept = self._steps_kept()
        if trained != kept:
            self.keeping.finish(self.number, name)
        self.stopping.end()
        self._compare()
        self.journal.goodput()
        self.journal.stopped(self.number, "signal", code)
        ranks.stop()
        raise SystemExit(code)

    def _finish(self, total: int) -> None:
        if self.valid is not None:
            self.evaluate()
        done = self.number >= total
        self.keeping.finish(self.number, "finished" if done else f"stopped: {self._stop_reason}")
        self._compare()
        self.journal.goodput()
        if done:
            self.journal.finished(self.number, self.sample())
            opening.record_finished(self.plan.recipe, self.number)
        self.journal.stopped(self.number, "finished" if done else "user", EXIT_DONE)

    # ------------------------------------------------------------------ what the loop uses

    def _prepare(self, recipe: Recipe, total: int, opened: RunState) -> None:
        """Open the run: plan, events, the newest checkpoint. Collective."""
        WHERE.phase = "resume"
        WHERE.folder, WHERE.attempt = opened.folder, opened.attempt
        self.plan = setup.with_recipe(self.plan, recipe)
        self.factor = setup.factor(self.schedule, total)
        self._stop_agreed = self._save_agreed = self._save_pending = False
        self._asked = Asked()
        self._stop_reason = ""
        self.bad: Bad | None = None
        per_sample = getattr(self.data, "tokens_per_sample", None)
        peak = probe.peak_flops_per_second(self.plan.decision.precision)
        self.journal = Journal(opened, self.plan, total, per_sample, peak)
        self.reading = Reading(self._loader, opened.attempt)
        self.scaler.start(self.plan.decision.global_batch * (per_sample or 1))
        earlier = opening.told_before(opened) if ranks.is_main() else []
        nodes = self.plan.cluster.nodes
        interval = Interval(recipe.checkpoint.every_steps, nodes=nodes, record=record_of(earlier))
        self.health = Health(recipe.train.on_spike, self.journal)
        own = {"trainer.scaler": self.scaler, "trainer.ledger": self.reading.ledger, "trainer.health": self.health}
        self.checkpointer = Checkpointer(
            opened.folder,
            self.model,
            self.optimizer,
            data=self.reading,
            state=ChainMap(self.state, own),
            policy=recipe.checkpoint,
            decision=msgspec.to_builtins(self.plan.decision),
            plan=msgspec.to_builtins(self.plan),
            completeness=self._complete(),
            events=self.journal.events,
            store=self.kept.store,
            lineage=self.kept.lineage,
        )
        self.kept.tell_with(self.journal.fallback)
        storing.pass_over_fruitless(self.kept, opened)
        self.keeping = Keeping(self.checkpointer, interval, self.stopping.budget, self.reading, self.journal)
        WHERE.count = storing.counting(self.kept, self.checkpointer)
        trained = self.number
        self.number = self.checkpointer.resume(strict_world=False)
        if self.number == 0 and trained:
            raise TrainingFailed(
                f"This Trainer has made {trained} steps that no checkpoint holds.",
                why="its weights are no longer those that a run starts with",
                fix="make a new Trainer, or save before the loop is left (checkpoint.every_steps, trainer.save())",
            )
        if self.number == 0:
            storing.refuse_silent_start(self.kept, opened)
        WHERE.step = self.number
        self.keeping.started(self.number)
        self.guards = Guards(
            self.model, self.plan.decision.mesh,
            every_steps=recipe.train.guard_every_steps, aliases=self.parallel.aliases,
        )  # fmt: skip
        if self.guards.every_steps:
            # One start: ranks that built or loaded other weights would train apart from the first step.
            self.guards.check(self.number, counted={}, divided={}, alike={})
        self.journal.started(ranks.gather_json(ranks.process_id()), str(self.device), self.number, opened.changes)
        if ranks.is_main():
            run_folder.write_plan(opened.folder, self.plan)
            self.journal.notice(self.stopping.budget, *expected(self.plan, self.journal.predicted_step, earlier))
        self.opened = True
        for reason in self.parallel.tensor.why if self.parallel.tensor is not None else ():
            self.journal.fallback("tensor parallel does not split all of the model", reason)
        if self.not_probed:
            self.journal.fallback("the loss was not probed for mixing samples", self.not_probed)
        if self.not_tried:
            self.journal.fallback("the module was not run in its parts before training", self.not_tried)

    def _complete(self) -> Completeness:
        """Looks for state that no checkpoint would hold; what there is already is refused now, before training.

        Collective. Raises: CheckpointError, on every rank.
        """
        arguments = {"model": self.model, "optimizer": self.optimizer, "data": self.data, "valid": self.valid,
                     "schedule": self.schedule, "loss": self.loss, "inputs": self.inputs}  # fmt: skip
        registered = [self.optimizer, *self.state.values(), *self.spared]
        completeness = Completeness(arguments, [self.model], registered)
        found = [[one.path, one.kind] for one in completeness.found()]
        refuse((path, kind) for each in ranks.gather_json(found) for path, kind in each)
        return completeness

    def _steps_kept(self) -> tuple[int, int]:
        """The newest step that is trained, and the newest that is committed. Called from a thread beside the loop."""
        checkpointer = getattr(self, "checkpointer", None)
        saved = self.number if checkpointer is None else checkpointer.saved_step or 0
        return self.number, saved

    def _say(self, event: Event) -> None:
        """From a thread beside the loop."""
        journal = getattr(self, "journal", None)
        if journal is not None:
            journal.events.emit(event)

    def _compare(self) -> None:
        """Hold what the plan was predicted to take against what it took. Collective."""
        held = ranks.gather_json(memory_use.peak_bytes())
        self.journal.compared(max((one for one in held if one is not None), default=None))

    def _loader(self, start: int) -> Any:
        decision = self.plan.decision
        return self.data.loader(
            seed=self.plan.recipe.seed,
            global_batch=decision.global_batch,
            micro_batches=decision.accumulation,
            rank=self.parallel.data_coord,
            ranks=decision.mesh.data_parallel,
            start=start,
        )

    def evaluate(self, data: Any = None) -> Evaluation:
        """The loss and metrics over all of `data` (default: `valid`), the same on every rank.

        A signal to stop cuts it short, saves, and leaves through SystemExit. Collective.
        """
        self._require_open()
        chosen = self.valid if data is None else as_data(data)
        if chosen is None:
            raise TrainingFailed("There is nothing to evaluate on.", fix="give the Trainer valid=, or evaluate(data)")
        with WHERE.within("evaluate"):
            return self._evaluate(chosen, default=data is None)

    def _evaluate(self, chosen: Any, *, default: bool) -> Evaluation:
        started = time.perf_counter()
        asking = Asking(self.signals)
        result = evaluate(self.model, self.parallel, chosen, self.loss, self.inputs, asking.told)
        asking.close()
        if result is None:
            self._leave(asking.answer)
        self.journal.evaluated(self.number, result, time.perf_counter() - started)
        if default:
            self.checkpointer.evaluated(self.number, {"loss": result.loss, **result.metrics})
        return result

    def _require_open(self) -> None:
        if not self.opened:
            raise TrainingFailed(
                "The run is not open yet.",
                why="run() loads the newest checkpoint, and before it the weights are the untrained ones",
                fix="call this in the loop over trainer.run(...), or after it",
            )

    def save(self, *, pin: bool = False) -> str:
        """Save now; the committed checkpoint's folder. With `pin`, retention never deletes it. Collective."""
        self._require_open()
        with WHERE.within("save"):
            saved = self.checkpointer.save(self.number, "asked", samples=self.reading.samples)
        if pin:
            ranks.on_main(lambda: self.checkpointer.pin(saved))
        return saved.path

    def stop(self, reason: str = "") -> None:
        """End the run after this step. One rank is enough: the ranks agree in the next step, which is then dropped.

        A Stream cannot give samples back, so there the next step still counts.
        """
        self._stop_reason = reason or "asked"
