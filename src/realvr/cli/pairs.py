"""``realvr counterfactual`` and ``realvr exchange``: what edited pictures do to answers and to latent spans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from realvr.answers import parser
from realvr.diagnostics import counterfactual_summary, exchange_summary
from realvr.diagnostics.files import claim, write_csv
from realvr.diagnostics.numbers import controls_line
from realvr.diagnostics.pairs import Pair, PairReport, fingerprint, read_pairs, unrelated
from realvr.errors import UserError
from realvr.evaluation.tables import wide_console
from realvr.runs.files import write_atomically, write_json
from realvr.runs.journal import Journal, Record, summarising
from realvr.runs.lock import hold
from realvr.runs.progress import Bar, busy

if TYPE_CHECKING:
    from realvr.evaluation.model_responder import ModelResponder

Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint="(required)")]
Data = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA", help_behavior_hint="(required)")]

USUAL_KS = (1, 2, 4, 8)


def counterfactual(
    model: Model,
    data: Data,
    out: Path,
    protocol: tuple[Literal["two-turn", "separate"], ...] = ("two-turn", "separate"),
    first_span: tuple[Literal["keep", "drop"], ...] = ("keep", "drop"),
    limit: int | None = None,
    latents: int | None = None,
    distances: bool = True,
    policy: str = "strict",
    batch: int = 8,
    max_new: int = 192,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    take_over: bool = False,
) -> int:
    """Ask a model about original and edited pictures and count how its answers follow the edit.

    Writes counterfactual.jsonl (every answer) and distances.jsonl as it goes, then the tables counterfactual.json, .md
    and .csv. The same command again continues where a run was stopped; another protocol adds to the same folder.

    Examples:
      realvr world make runs/world --split counterfactual
      realvr counterfactual runs/model runs/world/counterfactual/samples.jsonl --out runs/pairs
      realvr counterfactual runs/direct pairs.jsonl --out runs/direct-pairs --latents 0 --protocol separate

    Args:
        model: Directory of a checkpoint, a hub id, or mini or mini-base (packaged).
        data: File or folder with pairs: samples that share `pair`, with tags view and edit.
        out: Folder for records and tables.
        protocol: two-turn asks about both pictures in one conversation (the paper), separate in two.
        first_span: Whether the first reply's latent span stays in the context of the second turn (two-turn only).
        limit: At most so many pairs of each edit.
        latents: Number of latent slots K; by default the checkpoint's, and 0 for a model never trained with a span.
        distances: Also measure how far the edit moves the latent span.
        policy: How answers are read out of text: strict, or the rules of a public harness.
        batch: Pairs per batch.
        max_new: At most this many new tokens per answer.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        take_over: Take OUT from a run on another machine that is gone for certain.
    """
    _check(batch=batch)
    _check_policy(policy)
    if latents is not None and latents < 0:
        raise UserError(f"--latents is {latents}: the number of latent slots cannot be negative")
    for name, value in (("protocol", protocol), ("first-span", first_span)):
        if not value:
            raise UserError(f"--{name} is empty: name at least one")
    pairs, found = read_pairs(data, limit)
    _tell(found)
    with hold(out, "counterfactual", take_over):
        responder = _responder(model, max_new, min_tokens, max_tokens, device, dtype)
        count = _latents(model, responder, latents)
        settings = _settings(responder, data, pairs, found, count, policy, limit)
        claim(out, "counterfactual_settings.json", settings)
        from realvr.diagnostics.counterfactual import PairOptions, ask_all
        from realvr.diagnostics.distances import measure_all

        answers = Journal(out / "counterfactual.jsonl", counterfactual_summary.record_key)
        moved = Journal(out / "distances.jsonl", lambda record: record["pair"])
        options = PairOptions(count, tuple(protocol), tuple(first_span), policy, batch)
        with Bar("pairs", len(pairs)) as bar:
            ask_all(responder, pairs, answers, options, bar.advance)
        if distances:
            with Bar("distances", len(pairs)) as bar:
                measure_all(responder.backbone, pairs, unrelated(pairs), moved, count, batch, bar.advance)
        kept = {pair.id for pair in pairs}
        with summarising(answers, moved):
            summary = counterfactual_summary.summarise_pairs(_of(answers, kept), _of(moved, kept))
            report = counterfactual_summary.report(summary, model)
            replies = _of(answers, kept)
            unread = [(one["pair"], error) for one in replies for error in one["errors"] if error is not None]
        _write(
            out, "counterfactual", summary | {"settings": settings}, report, counterfactual_summary.csv_rows(summary)
        )
        _show(counterfactual_summary.HEADER, counterfactual_summary.table_rows(summary), model, out)
        _tell_unread(unread, len(pairs), "wrong, and as no change")
        _tell_controls(summary)
    return 0


def exchange(
    model: Model,
    data: Data,
    out: Path,
    k: str | None = None,
    seeds: int = 3,
    limit: int | None = None,
    latents: int | None = None,
    policy: str = "strict",
    batch: int = 4,
    rows: int = 64,
    max_new: int = 192,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    take_over: bool = False,
) -> int:
    """Swap latents between the two views of a pair and see whether the answer follows them.

    Picture, question and the other latents stay those of the recipient. Writes exchange.jsonl (every answer) as it
    goes, then the tables exchange.json, .md and .csv. The same command again continues where a run was stopped.

    Examples:
      realvr exchange runs/model runs/world/counterfactual/samples.jsonl --out runs/exchange
      realvr exchange runs/model pairs.jsonl --out runs/exchange --k 1,2,4 --seeds 5 --limit 100

    Args:
        model: Directory of a checkpoint that was trained with latent slots, a hub id, or mini (packaged).
        data: File or folder with pairs: samples that share `pair`, with tags view and edit.
        out: Folder for records and tables.
        k: How many positions are replaced, separated by commas; by default those of 1,2,4,8 that the span has. The
            whole span is always replaced as well.
        seeds: Random selections of positions for each k.
        limit: At most so many pairs of each edit, before those with an unchanged answer are left out.
        latents: Number of latent slots K; by default the checkpoint's.
        policy: How answers are read out of text: strict, or the rules of a public harness.
        batch: Pairs read together.
        rows: Spans decoded together; each holds a copy of its prompt's keys and values.
        max_new: At most this many new tokens per answer.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        take_over: Take OUT from a run on another machine that is gone for certain.
    """
    _check(batch=batch, rows=rows, seeds=seeds)
    _check_policy(policy)
    asked = None if k is None else parse_ks(k)
    pairs, found = read_pairs(data, limit)
    _tell(found)
    changed = [pair for pair in pairs if pair.changed]
    if not changed:
        raise UserError(f"{data}: the right answer changes in none of its {len(pairs)} pairs; there is nothing to swap")
    with hold(out, "exchange", take_over):
        responder = _responder(model, max_new, min_tokens, max_tokens, device, dtype)
        count = _explicit(model, responder, latents)
        if responder.latents == 0 or count < 1:
            raise UserError(
                f"{model} has no trained latent span (K = {min(count, responder.latents)}), so there is nothing to "
                "swap: train Stage 1 first (realvr train sft), and do not ask for --latents 0"
            )
        ks = _positions(asked, count)
        from realvr.diagnostics.exchange import ExchangeOptions, exchange_all

        options = ExchangeOptions(count, ks, seeds, policy, responder.sampling, batch, rows)
        settings = _settings(responder, data, pairs, found, count, policy, limit) | {"k": list(ks), "seeds": seeds}
        claim(out, "exchange_settings.json", settings)
        journal = Journal(out / "exchange.jsonl", exchange_summary.record_key)
        with Bar("pairs", len(changed)) as bar:
            exchange_all(responder.backbone, changed, unrelated(changed), journal, options, bar.advance)
        with summarising(journal):
            summary = exchange_summary.summarise_exchange(journal.records)
            report = exchange_summary.report(summary, model)
            unread = [(one["pair"], one["error"]) for one in journal.records if one["condition"] == "error"]
        _write(out, "exchange", summary | {"settings": settings}, report, exchange_summary.csv_rows(summary))
        _show(exchange_summary.HEADER, exchange_summary.table_rows(summary), model, out)
        _tell_unread(unread, len(changed), "")
        _tell_controls(summary)
    return 0


# ---------------------------------------------------------------------- shared by both


def _positions(asked: tuple[int, ...] | None, latents: int) -> tuple[int, ...]:
    """How many positions are replaced: what was asked for, or those of the usual that a span of K slots has."""
    if asked is None:
        return tuple(k for k in USUAL_KS if k <= latents)
    if asked[-1] > latents:
        raise UserError(
            f"--k asks for {asked[-1]} positions, but the span has K = {latents} slots: lower it, or leave --k out"
        )
    return asked


def parse_ks(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers, ascending, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--k is {text!r}: write numbers of positions separated by commas, such as 1,2,4") from None
    if found[0] < 1:
        raise UserError(f"--k is {text!r}: at least one position is replaced")
    return tuple(found)


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1")


def _check_policy(policy: str) -> None:
    parser(policy, "evaluation")


def _note(text: str) -> None:
    print(f"realvr: note: {text}", file=sys.stderr)


def _tell(found: PairReport) -> None:
    for line in found.lines():
        _note(line)


def _tell_unread(errors: Sequence[tuple[str, str]], pairs: int, counted: str) -> None:
    """A note about (pair, error); ``counted``: as what such pairs count, where they are not left out."""
    if errors:
        found = len(dict(errors))
        what = f"count as {counted}" if counted else "are left out"
        pair, error = errors[0]
        _note(f"{found} of {pairs} pairs cannot be read; these {what} (first: {pair}: {error})")


def _tell_controls(summary: dict[str, Any]) -> None:
    if line := controls_line(summary.get("controls")):
        _note(line)


def _responder(
    model: str,
    max_new: int,
    min_tokens: int | None,
    max_tokens: int | None,
    device: str | None,
    dtype: str | None,
) -> ModelResponder:
    from realvr.backbone.backbone import Backbone
    from realvr.evaluation.model_responder import ModelResponder
    from realvr.latent.sampling import Sampling
    from realvr.runs.quiet import quiet_transformers

    sampling = Sampling(temperature=0.0, max_new=max_new)
    quiet_transformers()
    with busy(f"reading {model}"):
        backbone = Backbone.load(model, device=device, dtype=dtype, min_tokens=min_tokens, max_tokens=max_tokens)
    return ModelResponder(backbone, sampling, path=model)


def _latents(model: str, responder: ModelResponder, asked: int | None) -> int:
    """K to ask with: what was asked for where that makes sense, else the checkpoint's."""
    if asked and not responder.latents:
        raise UserError(
            f"{model} was never trained with latent slots, so --latents {asked} would read untrained markers: "
            "use --latents 0, or train Stage 1 first (realvr train sft)"
        )
    if asked is None and responder.backbone.markers_added:
        _note(f"{model} was never trained with latent slots: it answers directly, K = 0")
    return _explicit(model, responder, asked)


def _explicit(model: str, responder: ModelResponder, asked: int | None) -> int:
    """The checkpoint's K, or the one asked for, with a notice where it is another."""
    if asked is not None and asked not in (0, responder.latents):
        _note(f"{model} was trained with K = {responder.latents}; K = {asked} was chosen explicitly")
    return responder.latents if asked is None else asked


def _settings(
    responder: ModelResponder,
    data: Path,
    pairs: Sequence[Pair],
    found: PairReport,
    latents: int,
    policy: str,
    limit: int | None,
) -> dict[str, Any]:
    """What decides the records. Protocols are not among it: each record names its own."""
    return {
        "model": responder.describe(),
        "data": str(data),
        "pairs": len(pairs),
        "questions": fingerprint(pairs),
        "left_out": found.counts(),
        "limit": limit,
        "latents": latents,
        "policy": policy,
    }


def _of(journal: Journal, pairs: set[str]) -> list[Record]:
    return [record for record in journal.records if record["pair"] in pairs]


def _write(out: Path, name: str, summary: dict[str, Any], report: str, rows: Sequence[dict[str, Any]]) -> None:
    write_json(out / f"{name}.json", summary)
    write_atomically(out / f"{name}.md", report)
    write_csv(out / f"{name}.csv", rows)


def _show(header: Sequence[str], rows: Sequence[Sequence[str]], title: str, out: Path) -> None:
    console = wide_console()
    table = Table(title=title)
    for place, name in enumerate(header):
        word = max(map(len, name.split()))
        table.add_column(name, no_wrap=place < 2, overflow="fold", min_width=word)  # words and names of rows stay whole
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"written to {out}", highlight=False, soft_wrap=True)
