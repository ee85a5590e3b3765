"""Which number of which diagnostic stands beside which number of the paper, by LaTeX label: its analysis and
app:diagnostics. diagnostics_designs.py has the other appendices."""

from __future__ import annotations

from diagnostics_cells import DRAWN, EDITS, NONE, OURS, Ask, Cell, Grid, Part, Step, drawn, paper

from realvr.evaluation.published import published

CLOUDS = {"visual": "visual embedding", "latents": "latents", "mean": "latent mean", "last": "last latent"}
STATES = {"prompt": "h_pre", "mean": "latent mean", "last": "last latent", "final": "final hidden"}


def parts() -> list[Part]:
    """In the paper's order."""
    return [
        *_mechanism(),
        _dependence(),
        _enrichment(),
        _similarity(),
        _normalised(),
        _consistency(),
        _rank(),
        _forcing(),
        _credit(),
        _structure(),
        _sensitivity(),
    ]


def _mechanism() -> list[Part]:
    links = {
        "latents_on_image": "latents on the image",
        "answer_on_image": "answer on the image",
        "answer_on_latents": "answer on the latents",
        "answer_on_question": "answer on the question",
        "evidence_share": "share of the latents' image attention in evidence bins",
        "evidence_even": "the same for even attention",
    }
    far = "fig:lvr-counterfactual-diagnostic"
    distances = [
        [
            "ReaLVR, range over four edits",
            "–".join(paper(far, "ReaLVR", f"distance_{end}", 2) for end in ("low", "high")),
            "",
        ],
        ["LVR, all four edits", "below " + paper(far, "LVR", "distance_below", 4), ""],
    ]
    word = "fig:latent-vocabulary-readout"
    return [
        Part(
            ("fig:attention-grounding-schematic",),
            "Attention between bins, mean over layers and heads; rows sum to one over the bins. Diagnostic "
            "`attention-map`.",
            [drawn([[name, Ask("attention-map", ("links", key))] for key, name in links.items()])],
        ),
        Part(
            (far,),
            "(b) Cosine distance between the mean latents of original and edited picture. (a) and (c) are "
            "pictures: the case "
            "browser shows ours. Diagnostic `distances`; our edits are not the paper's.",
            [
                Grid(
                    ("latent distance", "published, Qwen2.5-VL-7B", OURS),
                    [
                        *distances,
                        *([name, "", Ask("distances", ("distances", key, "latent"))] for key, name in EDITS.items()),
                    ],
                )
            ],
        ),
        Part(
            ("fig:token-saliency-cases", "fig:image-evidence-heatmaps-full"),
            "Overlays and token-pair maps of three questions. Diagnostic `saliency` draws both; its numbers "
            "over all questions "
            "are ours. Share of the attention, or of the saliency, of the positions that predict the answer's content "
            "tokens (one before each; other tests take the tokens themselves as queries, and find less on the "
            "latents); "
            "concentration is the evidence's share of the image part over its share of the area.",
            [
                Grid(
                    ("number", "published", "measured: `mini`, attention", "measured: `mini`, saliency"),
                    [
                        [
                            name,
                            DRAWN,
                            *(Ask("saliency", ("groups", "all", kind, key)) for kind in ("attention", "saliency")),
                        ]
                        for key, name in {
                            "image": "on the image",
                            "text": "on the prompt's text",
                            "latents": "on the latents",
                            "reply": "on the answer's own tokens",
                            "concentration": "concentration on the evidence",
                        }.items()
                    ],
                )
            ],
        ),
        Part(
            (word,),
            "Top token of each latent under the LM head, special tokens masked. Diagnostic `vocabulary`. The "
            "paper's closing tag "
            "is several tokens and begins with `<`; that of `mini` is one special token, its most frequent "
            "reading when nothing is masked.",
            [
                Grid(
                    ("number", "published, ReaLVR on Gemma-3-12B", OURS),
                    [
                        [
                            "latents",
                            " of ".join(paper(word, "ReaLVR", key, 0) for key in ("states", "questions"))
                            + " questions",
                            Ask("vocabulary", ("states",)),
                        ],
                        ["modal top token", "`<`", Ask("vocabulary", ("masked", "token"))],
                        ["share of latents with it", "1 (all)", Ask("vocabulary", ("masked", "share"))],
                        [
                            "its probability there",
                            paper(word, "ReaLVR", "probability", 1),
                            Ask("vocabulary", ("masked", "modal_probability")),
                        ],
                        ["modal top token, nothing masked", NONE, Ask("vocabulary", ("raw", "token"))],
                        ["share of latents with it", NONE, Ask("vocabulary", ("raw", "share"))],
                        [
                            "cosine to the closing tag",
                            paper(word, "ReaLVR", "cosine_end", 2),
                            Ask("vocabulary", ("cosine", "end")),
                        ],
                        [
                            "cosine to a random row",
                            paper(word, "ReaLVR", "cosine_random", 2),
                            Ask("vocabulary", ("cosine", "random")),
                        ],
                        [
                            "answer tokens predicted right, all tokens",
                            "all of one example",
                            Ask("vocabulary", ("answer", "right")),
                        ],
                    ],
                )
            ],
        ),
    ]


def _dependence() -> Part:
    label = "fig:accuracy-utility"
    kinds = ("position-mean", "another", "noise")

    def row(name: str, said: str, *path: Step) -> list[Cell]:
        return [name, said, *(Ask("dependence", ("replacements", kind, *path)) for kind in kinds)]

    said = {k: paper(label, "ReaLVR", f"k={k}", 2) for k in (0, 8)}
    return Part(
        (label,),
        "Probability of the right answer with the k most answer-read latents replaced. Diagnostic `dependence`. "
        "The paper does "
        "not say by what it replaces; the three replacements are ours.",
        [
            Grid(
                ("number", "published, ReaLVR", *(f"measured: `mini`, {kind}" for kind in kinds)),
                [
                    *(row(f"p, k = {k}", said.get(k, DRAWN), "probability", k) for k in range(9)),
                    row("drop, k = 0 to 8", paper(label, "ReaLVR", "drop", 2), "drop"),
                    ["drop of Monet, of both LVR variants", "smaller; " + DRAWN, "", "", ""],
                ],
            )
        ],
    )


def _enrichment() -> Part:
    label = "fig:attention-ratio-look"
    kinds = {"correct": "right answers", "incorrect": "wrong answers", "latents_curve": "queries of latents (ours)"}
    claims: list[list[Cell]] = [
        ["ReaLVR, lower layers", "near " + paper(label, "ReaLVR", "lower layers", 0), "", "", ""],
        ["ReaLVR, middle layers", "about " + paper(label, "ReaLVR", "highest", 0), "", "", ""],
        ["Monet, highest", "near " + paper(label, "Monet", "highest", 1), "", "", ""],
        ["LVR, highest", "at most about " + paper(label, "LVR", "highest", 1), "", "", ""],
    ]
    layers: list[list[Cell]] = [
        [f"layer {i + 1} of 4", "", *(Ask("enrichment", (kind, "layers", i, "ratio"), 2) for kind in kinds)]
        for i in range(4)
    ]
    return Part(
        (label,),
        "Attention of answer positions on the evidence over that on windows of the same shape. Diagnostic "
        "`enrichment`; curves "
        "by layer are drawn, the text gives their heights.",
        [Grid(("ρ", "published", *(f"measured: `mini`, {name}" for name in kinds.values())), [*claims, *layers])],
    )


def _similarity() -> Part:
    label, names = (
        "tab:diag-raw-similarity",
        {"off_diagonal": "off-diagonal", "adjacent": "adjacent", "maximum": "maximum"},
    )
    examples = ("VISCOT 18", "VISCOT 23")
    rows: list[list[Cell]] = [
        ["latent tokens", *(paper(label, one, "latents", 0) for one in examples), Ask("similarity", ("latents",), 0)]
    ]
    rows += [
        [f"{name} cosine", *(paper(label, one, key, 4) for one in examples), Ask("similarity", ("within", key))]
        for key, name in names.items()
    ]
    return Part(
        (label, "tab:diag-similarity"),
        "Cosine between the latents of one question; the paper has two examples, ours is a mean. Diagnostic "
        "`similarity` "
        "(`--latents evidence` takes as many latents as evidence tokens, as the paper's rows do).",
        [Grid(("number", *(f"published, {one}" for one in examples), OURS), rows)],
    )


def _normalised() -> Part:
    label = "tab:diag-context-normalized"
    of = {"latents": "latents", "dummies": "dummies", "ordinary": "ordinary"}
    rows: list[list[Cell]] = []
    for kind in ("raw", "centred", "whitened"):
        rows += [
            [f"{kind} adjacent cosine, {name}", paper(label, kind, key, 4), Ask("similarity", ("adjacent", kind, key))]
            for key, name in of.items()
        ]
        rows.append(
            [
                f"{kind}, latents − ordinary",
                paper(label, kind, "minus_ordinary", 4, sign=True),
                Ask("similarity", ("minus_ordinary", kind), sign=True),
            ]
        )
    rows.append(
        [
            "residualised adjacent cosine, latents",
            paper(label, "residualised", "latents", 4),
            Ask("similarity", ("residualised",)),
        ]
    )
    rows += [
        [
            f"mean cosine, {name}",
            paper(label, name, "latents", 4),
            Ask("similarity", (name.replace(" ", "_"),), setting=("by", "arrows")),
        ]
        for name in ("same task", "different task")
    ]
    return Part(
        (label,),
        "Diagnostic `similarity`. Trails are one task: same and different task are ours by number of arrows.",
        [Grid(("number", "published, LVR on BLINK (n = 697)", OURS), rows)],
    )


def _consistency() -> Part:
    label = "tab:diag-rcs"
    names = {
        "reference": "no augmentation",
        "augmentation": "brightness, contrast, rotation, crop",
        "mask 0.05": "mask, 0.05",
        "mask 0.30": "mask, 0.30",
        "blur_jitter 0.10": "blur + jitter, 0.10",
        "blur_jitter 0.50": "blur + jitter, 0.50",
    }
    rows: list[list[Cell]] = [
        [name, paper(label, key, "rcs", 8), Ask("consistency", ("rows", (("condition", key),), "rcs"))]
        for key, name in names.items()
    ]
    wide = "–".join(paper(label, "affine", f"rcs_{end}", 5) for end in ("low", "high")) + " over the range"
    rows += [
        [f"affine, {s}", wide, Ask("consistency", ("rows", (("condition", f"affine {s}"),), "rcs"))]
        for s in ("0.05", "0.10", "0.20")
    ]
    return Part(
        (label, "tab:diag-geometry"),
        "Mean pairwise cosine of the mean latents of one question under repeated augmentation. Diagnostic "
        "`consistency`. A cell of a board is 8 of 48 pixels: a shift by 0.10 moves arrows by up to half a cell.",
        [Grid(("condition", "published, LVR", OURS), rows)],
    )


def _rank() -> Part:
    label = "tab:diag-rank"
    numbers = {
        "rank90": ("rank90", 0),
        "rank95": ("rank95", 0),
        "rank99": ("rank99", 0),
        "pr": ("participation ratio", 2),
    }
    rows: list[list[Cell]] = []
    for cloud, name in CLOUDS.items():
        for key, (words, digits) in {"rows": ("rows", 0), "width": ("width", 0), **numbers}.items():
            said = [paper(label, f"{data}, {cloud}", key, digits) for data in ("BLINK", "VISCOT")]
            rows.append([f"{name}, {words}", *said, Ask("rank", ("clouds", cloud, key), digits)])
    return Part(
        (label,),
        "Principal directions for 90, 95, 99 % of the variance. Diagnostic `rank`. Whole clouds, so numbers "
        "have no interval; "
        'rank.json has the same numbers of two halves of the data. n is the row "rows".',
        [Grid(("number", "published, LVR on BLINK", "published, LVR on VISCOT", OURS), rows, n=False)],
    )


def _forcing() -> Part:
    label = "tab:diag-teacher-forcing"
    rows: list[list[Cell]] = []
    schedules = (("free-running", 0), ("force k=4", 2), ("force k=8", 4), ("force k=16", 8))
    for row, forced in schedules:
        name = row if not forced else f"{row[6:].replace('=', ' = ')} of 16 forced; ours {forced} of 8"
        for key in ("mse", "cosine"):
            said = [paper(label, row, f"{data}_{key}", 4) for data in ("blink", "viscot")]
            asked = Ask("forcing", ("targets", "boxes", "schedules", (("forced", forced),), key), 4)
            rows.append([f"{name}, {'MSE' if key == 'mse' else key}", *said, asked])
    return Part(
        (label,),
        "Latents against their reconstruction targets, the first k forced. Diagnostic `forcing`; MSE depends on "
        "the scale of "
        "the visual tokens. `mini` has K = 8, so its steps are the same shares of the span.",
        [Grid(("number", "published, LVR on BLINK", "published, LVR on VISCOT", OURS), rows)],
    )


def _credit() -> Part:
    label, group = "tab:diag-credit-residual", ("groups", "trails-pairs")
    sets = ("MMVP", "BLINK")
    readout: list[list[Cell]] = [
        [
            "accuracy, %",
            *(paper(label, one, "accuracy", 2) for one in sets),
            " / ".join(paper(label, "HR-4K / HR-8K", f"accuracy_{s}", 2) for s in ("4k", "8k")),
            Ask("readout", (*group, "accuracy"), 1, scale=100),
        ],
        [
            "mass Δ, right − wrong",
            *(paper(label, one, "mass_delta", 4, sign=True) for one in sets),
            "higher; " + NONE,
            Ask("readout", (*group, "mass", "delta"), 4, sign=True),
        ],
        [
            "top-1 Δ, right − wrong",
            *(paper(label, one, "top1_delta", 4, sign=True) for one in sets),
            "higher; " + NONE,
            Ask("readout", (*group, "top1", "delta"), 4, sign=True),
        ],
        ["mass, wrong answers", NONE, NONE, NONE, Ask("readout", (*group, "mass", "incorrect"), 4)],
    ]
    injection: list[list[Cell]] = [
        [
            "best change toward the counterfactual prediction (share)",
            " to ".join(paper(label, "residual injection", f"toward_{end}", 4, sign=True) for end in ("low", "high")),
            Ask("residual", ("best", "toward", "value"), 3, scale=0.01, sign=True),
        ],
        [
            "best change of the margin",
            "up to " + paper(label, "residual injection", "margin_up_to", 4, sign=True) + " (logits)",
            Ask("residual", ("best", "margin", "value"), 2, sign=True),
        ],
        [
            "rollout records (ours: pairs, both directions)",
            paper(label, "residual injection", "records", 0),
            Ask("residual", ("pairs",), 0),
        ],
    ]
    return Part(
        (label,),
        "Answer-to-latent attention of generated answers, and latents pushed toward those of the edited "
        "picture. Diagnostics "
        "`readout` and `residual`; our margin is in nats. "
        "We choose α on one half of the pairs and report the other.",
        [
            Grid(("readout", "published, MMVP", "published, BLINK", "published, HR-4K / HR-8K", OURS), readout),
            Grid(("residual injection", "published", OURS), injection),
        ],
    )


def _structure() -> Part:
    label = "tab:diag-task-structure"
    rows: list[list[Cell]] = []
    for key, name in STATES.items():
        at, n = ("representations", key), ("representations", key, "samples")
        rows += [
            [f"{name}, ARI", paper(label, key, "ari", 4), Ask("task-structure", (*at, "ari"), n=n)],
            [
                f"{name}, bootstrap ARI",
                paper(label, key, "bootstrap_ari", 4),
                Ask("task-structure", (*at, "bootstrap_ari")),
            ],
            [f"{name}, linear accuracy", paper(label, key, "linear", 4), Ask("task-structure", (*at, "linear"))],
            [f"{name}, MLP accuracy", paper(label, key, "mlp", 4), Ask("task-structure", (*at, "mlp"))],
        ]
    rows.append(["chance: largest class", NONE, Ask("task-structure", ("majority",))])
    return Part(
        (label, "tab:diag-task-counterfactual"),
        "Diagnostic `task-structure`. The paper's labels are BLINK's tasks; trails are one task, and the label "
        "is the number of "
        "arrows, which the prompt does not tell.",
        [Grid(("number", "published, LVR on BLINK (n = 697)", OURS), rows)],
    )


def _sensitivity() -> Part:
    label = "tab:diag-counterfactual"
    said = {"should_flip": 2, "model_flip": 2, "correct_flip": 2, "latent_distance": 6, "final_distance": 6}
    rows: list[list[Cell]] = [
        [
            "published",
            "LVR",
            one.row.replace("_", " "),
            "512",
            *(paper(label, one.row, key, digits) for key, digits in said.items()),
        ]
        for one in published(label)
    ]
    rates = ("should_flip", "model_flip", "correct_flip_of_all")
    for model in ("mini", "mini-direct"):
        for key, name in EDITS.items():
            own = [Ask("sensitivity", ("edits", key, rate), 1, model, 100) for rate in rates]
            far: list[Cell] = [Ask("sensitivity", ("edits", key, which), 3, model) for which in ("latent", "final")]
            if model == "mini-direct":
                far[0] = "no span"
            rows.append(
                ["measured", f"`{model}`", name, Ask("sensitivity", ("edits", key, "pairs"), 0, model), *own, *far]
            )
    return Part(
        (label,),
        "Diagnostic `sensitivity`: each picture in its own conversation, rates of all pairs in percent, cosine "
        "distances.",
        [
            Grid(
                (
                    "",
                    "method",
                    "edit",
                    "pairs",
                    "should flip",
                    "model flip",
                    "correct flip",
                    "latent distance",
                    "final distance",
                ),
                rows,
                n=False,
            )
        ],
    )
