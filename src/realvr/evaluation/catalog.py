"""What is known about each benchmark: the files it comes in, how it is scored, what to cite. Nothing is downloaded.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from realvr.errors import UserError

PAPER_BLINK = ("Counting", "IQ_Test", "Jigsaw", "Relative_Reflectance", "Spatial_Relation")
"""The five subtasks behind the paper's BLINK number (697 questions)."""
BLINK_ROWS: dict[str, int] = {
    "Art_Style": 117,
    "Counting": 120,
    "Forensic_Detection": 132,
    "Functional_Correspondence": 130,
    "IQ_Test": 150,
    "Jigsaw": 150,
    "Multi-view_Reasoning": 133,
    "Object_Localization": 122,
    "Relative_Depth": 124,
    "Relative_Reflectance": 134,
    "Semantic_Correspondence": 139,
    "Spatial_Relation": 143,
    "Visual_Correspondence": 172,
    "Visual_Similarity": 135,
}
"""Rows of every subtask of the validation split."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. ``format`` is the reader's name, see `realvr.data.detect`."""

    name: str
    title: str
    format: str
    layout: tuple[str, ...]
    """Files as they are published, for a person to compare with."""
    rows: int
    """Questions in the whole set that is evaluated by default."""
    where: str
    licence: str
    rule: str
    """How it is scored."""
    citation: str
    """BibTeX."""
    files: tuple[str, ...] = ()
    """Patterns, without case, of the data file inside a folder; empty where the folder itself is the input."""
    without: str = ""
    """Pattern of files that belong to a sister benchmark."""
    tasks: tuple[str, ...] = ()
    """Subtasks evaluated by default; empty means all there are."""
    caveats: tuple[str, ...] = ()

    @property
    def example(self) -> str:
        """A command line."""
        return f"realvr eval MODEL --bench {self.name}=PATH --out runs/{self.name}"

    def expectation(self) -> str:
        """What should be at the path, in words."""
        return f"{self.title} is expected as {' or '.join(self.layout)} ({self.where})"


_MMVP_CITATION = """\
@inproceedings{tong2024eyes,
  title = {Eyes Wide Shut? Exploring the Visual Shortcomings of Multimodal LLMs},
  author = {Tong, Shengbang and Liu, Zhuang and Zhai, Yuexiang and Ma, Yi and LeCun, Yann and Xie, Saining},
  booktitle = {CVPR},
  year = {2024}
}"""
_BLINK_CITATION = """\
@inproceedings{fu2024blink,
  title = {BLINK: Multimodal Large Language Models Can See but Not Perceive},
  author = {Fu, Xingyu and Hu, Yushi and Li, Bangzheng and Feng, Yu and Wang, Haoyu and Lin, Xudong and Roth, Dan and
            Smith, Noah A. and Ma, Wei-Chiu and Krishna, Ranjay},
  booktitle = {ECCV},
  year = {2024}
}"""
_HR_CITATION = """\
@inproceedings{wang2025divide,
  title = {Divide, Conquer and Combine: A Training-Free Framework for High-Resolution Image Perception in Multimodal
           Large Language Models},
  author = {Wang, Wenbin and Ding, Liang and Zeng, Minyan and Zhou, Xiabin and Shen, Li and Luo, Yong and Tao, Dacheng},
  booktitle = {AAAI},
  year = {2025}
}"""
_MME_CITATION = """\
@inproceedings{zhang2025mmerealworld,
  title = {MME-RealWorld: Could Your Multimodal LLM Challenge High-Resolution Real-World Scenarios that are Difficult
           for Humans?},
  author = {Zhang, Yi-Fan and Zhang, Huanyu and Tian, Haochen and Fu, Chaoyou and Zhang, Shuangqing and others},
  booktitle = {ICLR},
  year = {2025}
}"""
_VSTAR_CITATION = """\
@inproceedings{wu2024vstar,
  title = {V*: Guided Visual Search as a Core Mechanism in Multimodal LLMs},
  author = {Wu, Penghao and Xie, Saining},
  booktitle = {CVPR},
  year = {2024}
}"""
_HR_RULE = (
    "accuracy per option cycle for all, single and cross, then the mean over the four cycles; there is no all-four rule"
)
_HR_CAVEATS = (
    "The TSV is streamed and its images stay in the file until they are asked about; of a parquet file, the encoded "
    "images are held in memory.",
    "The four cycles of a question share their image and are asked one after the other.",
)
_MME_RULE = "micro accuracy over all questions; also per task, per subtask, and Avg-C, the plain mean over subtasks"
_MME_CAVEATS = (
    "Redistribution is forbidden: fetch it yourself, and do not publish its images.",
    "Five options; E says that the feature does not exist.",
    "Image paths in the JSON are relative to its folder, or to --images NAME=DIR.",
)

_ALL = (
    Benchmark(
        "mmvp",
        "MMVP",
        "mmvp",
        ("a folder with Questions.csv and 'MMVP Images/1.jpg' to '300.jpg'",),
        300,
        "the dataset MMVP/MMVP on the Hugging Face hub",
        "MIT",
        "accuracy over single questions (the paper's number), and over pairs, both right (the official score)",
        _MMVP_CITATION,
        caveats=(
            "The original file has the answers swapped at Index 99/100 and 279/280: --mmvp-corrected corrects them; "
            "leave it off for the later upload, which is already right.",
            "Papers quote single accuracy over 300 or pair accuracy over 150: compare like with like.",
        ),
    ),
    Benchmark(
        "blink",
        "BLINK",
        "blink",
        ("a folder of <SubTask>/val-00000-of-00001.parquet",),
        sum(BLINK_ROWS[task] for task in PAPER_BLINK),
        "the dataset BLINK-Benchmark/BLINK on the Hugging Face hub",
        "Apache-2.0",
        "accuracy per subtask; headline: macro, the plain mean over subtasks",
        _BLINK_CITATION,
        tasks=PAPER_BLINK,
        caveats=(
            f"By default the paper's five subtasks ({', '.join(PAPER_BLINK)}); --blink-tasks all takes all fourteen "
            f"({sum(BLINK_ROWS.values()):,} questions), the official set.",
            "The official score is macro; some harnesses print micro. Both are given.",
            "Only the val split has answers.",
            "Labels of Relative_Reflectance were corrected in late 2025, and files do not say which they hold: "
            "eval.json records a hash of every subtask's labels (sets.blink.labels): compare runs where it agrees.",
        ),
    ),
    *(
        Benchmark(
            f"hrbench-{size}",
            f"HR-Bench {size.upper()}",
            "hr-bench",
            (f"hr_bench_{size}.tsv", f"hr_bench_{size}.parquet"),
            800,
            "the dataset DreamMr/HR-Bench on the Hugging Face hub",
            "see the card of the dataset",
            _HR_RULE,
            _HR_CITATION,
            files=(f"*hr*bench*{size}*.tsv", f"*hr*bench*{size}*.parquet"),
            caveats=_HR_CAVEATS,
        )
        for size in ("4k", "8k")
    ),
    Benchmark(
        "mme-realworld",
        "MME-RealWorld",
        "mme-realworld",
        ("MME_RealWorld.json beside its images", "a .tsv or .parquet with images inside"),
        23_609,
        "the dataset yifanzhang114/MME-RealWorld on the Hugging Face hub",
        "academic research only; redistribution is forbidden",
        _MME_RULE,
        _MME_CITATION,
        files=("*mme*realworld*.json", "*mme*realworld*.tsv", "*mme*realworld*.parquet"),
        without="*lite*",
        caveats=_MME_CAVEATS,
    ),
    Benchmark(
        "mme-realworld-lite",
        "MME-RealWorld-Lite",
        "mme-realworld",
        ("MME-RealWorld-Lite.json beside its images", "a .tsv or .parquet with images inside"),
        1_919,
        "the dataset yifanzhang114/MME-RealWorld-Lite on the Hugging Face hub",
        "academic research only; redistribution is forbidden",
        _MME_RULE,
        _MME_CITATION,
        files=("*mme*realworld*lite*.json", "*mme*realworld*lite*.tsv", "*mme*realworld*lite*.parquet"),
        caveats=("The set behind the paper's MME-RealWorld number.", *_MME_CAVEATS),
    ),
    Benchmark(
        "vstar",
        "V*",
        "vstar",
        ("test_questions.jsonl beside its images", "a .parquet with images inside"),
        191,
        "the dataset craigwu/vstar_bench on the Hugging Face hub",
        "see the card of the dataset",
        "accuracy over all questions; also per category: direct_attributes (115) and relative_position (76)",
        _VSTAR_CITATION,
        files=("*test_questions*.jsonl", "*vstar*.jsonl", "*vstar*.json", "*vstar*.parquet", "test-*.parquet"),
        caveats=(
            "Not one of the five tasks of the paper's mean.",
            "The text of a question ends in its options and an instruction; both are taken off and asked in the words "
            "of all benchmarks. The published text stays in the sample's meta['prompt'].",
            "Image paths in the JSON lines are relative to their folder, or to --images NAME=DIR.",
        ),
    ),
)
CATALOG: dict[str, Benchmark] = {bench.name: bench for bench in _ALL}
"""The benchmarks, in the order in which they are shown."""


MINI = "mini-"
"""Before the name of a benchmark: its stand-in, drawn by the embedded world."""


def base_name(name: str) -> str:
    """The benchmark whose files and scoring rule a name has: mmvp for mmvp and mini-mmvp. Other names stay."""
    base = name.removeprefix(MINI)
    return base if base in CATALOG else name


def benchmark_named(name: str) -> Benchmark:
    """The entry of a name, or a `UserError` that lists them."""
    if name not in CATALOG:
        raise UserError(f"no benchmark {name!r}; there are {', '.join(CATALOG)}")
    return CATALOG[name]


def data_path(bench: Benchmark, path: Path) -> Path:
    """The data file of a benchmark, given itself or by its folder; a `UserError` says what is expected where."""
    if not path.exists():
        raise UserError(f"{bench.name}: {path} does not exist; {bench.expectation()}")
    if not path.is_dir() or not bench.files:
        return path
    found = [
        file
        for file in sorted(path.iterdir())
        if any(fnmatch(file.name.lower(), pattern) for pattern in bench.files)
        and not (bench.without and fnmatch(file.name.lower(), bench.without))
    ]
    if not found:
        raise UserError(f"{bench.name}: {path} holds no such file; {bench.expectation()}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{bench.name}: {path} holds several files that may be meant ({names}); name one of them")
    return found[0]


def blink_tasks(text: str | None) -> tuple[str, ...]:
    """Subtasks from ``paper`` (or None), ``all`` or names with commas between them."""
    if text is None or text == "paper":
        return PAPER_BLINK
    if text == "all":
        return tuple(BLINK_ROWS)
    folded = {name.lower(): name for name in BLINK_ROWS}
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in wanted if part.lower().replace(" ", "_") not in folded]
    if unknown or not wanted:
        raise UserError(
            f"--blink-tasks: no subtask {unknown[0] if unknown else text!r}; write paper, all, or names out of "
            f"{', '.join(BLINK_ROWS)}"
        )
    return tuple(dict.fromkeys(folded[part.lower().replace(" ", "_")] for part in wanted))
