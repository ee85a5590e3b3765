"""Which number of which diagnostic stands beside which number of the paper, by LaTeX label: its appendices on cases,
attention designs and mechanism tests. diagnostics_labels.py has the rest."""

from __future__ import annotations

from diagnostics_cells import DRAWN, EDITS, OURS, Ask, Cell, Grid, Part, drawn, paper

from realvr.evaluation.published import published


def parts() -> list[Part]:
    """In the paper's order."""
    return [
        *_cases(),
        _variation(),
        _evidence_readout(),
        _switch(),
        _ranking(),
        _counterfactual(),
        _exchange(),
        _factorial(),
    ]


def _cases() -> list[Part]:
    figures = {
        "01–03": ("01-03",),
        "04–06": ("04-06", "04-07"),
        "07–09": ("07-09", "07-09-10", "09-12"),
        "10–12": ("10-12", "11-12"),
    }
    floats = {name: [f"fig:appendix-token-saliency-{end}" for end in ends] for name, ends in figures.items()}
    floats["07–09"].insert(1, "fig:token-saliency-full")
    browser = (
        "no number: the case browser shows ours (`realvr diagnose cases mini runs/benchmarks`, then `realvr report`)"
    )
    return [
        Part(
            tuple(label for labels in floats.values() for label in labels),
            "Twelve cases, each with attention and saliency of both models. Diagnostic `saliency` draws attention of "
            "each model, then saliency of each, of the "
            "first twelve questions of the run, whatever the answers are; the numbers over all questions are "
            "above.",
            [
                Grid(
                    ("figure", "cases", "published", "measured"),
                    [
                        [", ".join(labels), name, DRAWN, "drawn as well, saliency.png"]
                        for name, labels in floats.items()
                    ],
                )
            ],
        ),
        Part(
            ("fig:five-benchmark-cases",),
            "One question of each benchmark, with annotated answers.",
            [Grid(("number", "published", "measured"), [["five questions", DRAWN, browser]])],
        ),
    ]


def _variation() -> Part:
    label, kinds = "fig:slot-variance-map", ("examples", "questions")
    gaps: list[list[Cell]] = [
        [f"(c) top-token gap, {one.row}", paper(label, one.row, "gap", 2), "", ""] for one in published(label)
    ]
    gaps[-1][0] = "(c) top-token gap, each LVR variant"
    gaps.append(["(c) top-token gap, ours", "", *(Ask("variation", (kind, "gap")) for kind in kinds)])
    places: list[list[Cell]] = [
        [f"(a), (b) latent {t + 1}", DRAWN, *(Ask("variation", (kind, "positions", t)) for kind in kinds)]
        for t in range(8)
    ]
    return Part(
        (label,),
        "Variation of each latent (a) across examples and (b) across questions on one picture. Diagnostic "
        "`variation`. The paper "
        "does not print the formula of the gap; ours is in the diagnostic's docstring, so the heights cannot be "
        "compared.",
        [
            Grid(
                ("number", "published", "measured: `mini`, across examples", "measured: `mini`, across questions"),
                [*gaps, *places],
            )
        ],
    )


def _evidence_readout() -> Part:
    rows: list[list[Cell]] = [
        [
            f"latent {t + 1}",
            DRAWN,
            *(Ask("evidence-readout", ("maps", "evidence", layer, t, "ratio"), 2) for layer in range(4)),
            Ask("evidence-readout", ("steps", t, "image")),
            Ask("evidence-readout", ("steps", t, "read"), 4),
        ]
        for t in range(8)
    ]
    return Part(
        ("fig:design-evidence-readout",),
        "(a) ρ by layer and latent, (b) attention mass on the image, (c) attention from the query of the first "
        "answer token. "
        "Diagnostic `evidence-readout`. Means of ratios: where the background gets almost nothing, a few "
        "questions dominate, as the "
        "wide intervals of layer 4 show.",
        [
            Grid(
                ("", "published", *(f"(a) measured, layer {i}" for i in range(1, 5)), "(b) measured", "(c) measured"),
                rows,
            )
        ],
    )


def _switch() -> Part:
    names = {
        "question": "density in the question's own region",
        "paraphrase": "the same for its paraphrase",
        "other": "density in the other question's region",
        "selection": "own − other, by picture",
        "paraphrase_gap": "question against paraphrase, absolute difference",
    }
    return Part(
        ("fig:design-question-switch",),
        "Two questions and their paraphrases on one picture; density has mean 1 over the image. The paper shows "
        "one photograph; "
        "ours are boards with two starts. Diagnostic `question-switch`.",
        [drawn([[name, Ask("question-switch", (key,))] for key, name in names.items()])],
    )


def _ranking() -> Part:
    orders = {"contrast": "contrast", "attention": "raw attention", "random": "random"}
    readout: list[list[Cell]] = [
        [
            f"latent {t + 1}",
            DRAWN,
            *(Ask("ranking", (key, t), 5) for key in ("correct", "incorrect", "contrast")),
            Ask("ranking", ("single", t)),
        ]
        for t in range(8)
    ]
    losses: list[list[Cell]] = [
        [f"k = {k}", DRAWN, *(Ask("ranking", ("losses", order, k)) for order in orders)] for k in range(1, 9)
    ]
    ranks: list[list[Cell]] = [
        [f"Spearman of {name} and single loss, within questions", DRAWN, Ask("ranking", ("correlation", key, "within"))]
        for key, name in (("contrast", "contrast"), ("attention", "raw attention"))
    ]
    return Part(
        ("fig:design-latent-intervention",),
        "Diagnostic `ranking`, latents replaced by the position mean; the paper has 1,000 examples of BLINK on "
        "Qwen2.5-VL-7B. "
        "Losses in nats; all orders coincide at k = 8.",
        [
            Grid(
                (
                    "(a) and (c)",
                    "published",
                    "measured: readout, right answer",
                    "measured: readout, wrong answers",
                    "measured: contrast",
                    "measured: loss of this latent alone",
                ),
                readout,
            ),
            Grid(("(b) loss", "published", *(f"measured: {name}" for name in orders.values())), losses),
            Grid(("(c)", "published", OURS), ranks),
        ],
    )


def _counterfactual() -> Part:
    label = "tab:complete-counterfactual"
    names = (
        "original_accuracy",
        "edited_accuracy",
        "prediction_change",
        "strict_paired_correct_flip",
        "false_flip",
        "parse_coverage",
    )
    rows: list[list[Cell]] = [
        [
            "published",
            one.method,
            "two turns",
            one.row.replace("_", " "),
            paper(label, one.row, "changed", 0, method=one.method),
            paper(label, one.row, "unchanged", 0, method=one.method),
        ]
        + [paper(label, one.row, name, 1, method=one.method) for name in names]
        for one in published(label)
    ]
    for words in ("two turns", "separate"):
        for model in ("mini", "mini-direct"):
            for key, edit in EDITS.items():
                turns = "two-turn/keep" if model == "mini" else "two-turn/none"  # without a span there is none to keep
                at = ("protocols", words if words == "separate" else turns, "edits", key)
                sizes = [Ask("counterfactual", (*at, name), 0, model) for name in ("changed", "unchanged")]
                rates: list[Cell] = [
                    Ask("counterfactual", (*at, name.replace("paired_", "")), 1, model, 100, counts=True)
                    for name in names
                ]
                if key == "turn_beside":
                    rates[:4] = ["no such pair"] * 4
                elif key != "swap_circles":
                    rates[4] = "no such pair"
                rows.append(["measured", f"`{model}`", words, edit, *sizes, *rates])
    return Part(
        (label,),
        "Percent, with counts in parentheses; the first four rates are over \\|C\\| pairs whose answer changes, "
        "false flips over \\|U\\| others, coverage over both "
        "views of all. Diagnostic `counterfactual`. `mini-direct` "
        "is our control without a span. Both are worse in two turns than in separate conversations, `mini` by far; "
        "why was not tested.",
        [
            Grid(
                (
                    "",
                    "method",
                    "protocol",
                    "edit",
                    "\\|C\\|",
                    "\\|U\\|",
                    "A₀",
                    "A₁",
                    "change",
                    "strict flip",
                    "false flip",
                    "coverage",
                ),
                rows,
                n=False,
            )
        ],
    )


def _exchange() -> Part:
    label = "tab:latent-exchange"
    wanted = {f"{selector}, k={k}": ("swap", selector, k) for k in (1, 2, 4) for selector in ("contrast", "random")}
    wanted |= {"full span, k=8": ("swap", "full", 8), "unrelated donor, k=8": ("unrelated", "full", 8)}
    rows: list[list[Cell]] = []
    for name, (condition, selector, k) in wanted.items():
        at = ("rows", (("condition", condition), ("selector", selector), ("k", k)))
        lifts = [paper(label, name, "donor_answer_lift", 1, True, method) for method in ("LVR-RL", "ReaLVR")]
        margins = [paper(label, name, "donor_margin_shift", 2, True, method) for method in ("LVR-RL", "ReaLVR")]
        own = Ask("exchange", (*at, "donor_lift"), 1, sign=True)
        rows.append(
            [name.replace("=", " = "), *lifts, own, *margins, Ask("exchange", (*at, "margin_shift"), 2, sign=True)]
        )
    header = [
        f"{number}, {who}"
        for number in ("lift (points)", "margin shift (nats)")
        for who in ("published LVR-RL", "published ReaLVR", "measured `mini`")
    ]
    return Part(
        (label,),
        "Latents of the other picture put in, the recipient's picture kept; differences from the self-swap. "
        "Diagnostic `exchange`. "
        "An unrelated "
        "donor moves `mini` to the wanted answer about as often as a random choice among four options would.",
        [Grid(("positions", *header), rows)],
    )


def _factorial() -> Part:
    label = "tab:mass-matched-factorial"
    names = {
        "mmvp": "MMVP",
        "blink": "BLINK",
        "hrbench-4k": "HR-4K",
        "hrbench-8k": "HR-8K",
        "mme-realworld": "MME-RW",
        "average": "mean",
        "strict_paired_correct_flip": "strict flip",
        "false_flip": "false flip",
    }
    rows: list[list[Cell]] = []
    for one in published(label):
        rows.append(["published", one.row, *(paper(label, one.row, key, 1) for key in names)])
    rows.append(["measured", "all four", *["not run"] * len(names)])
    return Part(
        (label,),
        "Percent, mean ± standard deviation over training seeds. Not measured: it needs every arm trained with "
        "several seeds. The four "
        "methods are configured (`realvr train rl CONFIG --method mass-matched-c±`, and `u+`, `u±`, `c+`), and "
        "`realvr diagnose "
        "sensitivity` and `counterfactual` show runs named NAME-seed0, NAME-seed1, … as one arm with mean and "
        "deviation.",
        [Grid(("", "where, what", *names.values()), rows, n=False)],
    )
