"""Clusters and probes of vectors with labels, by scikit-learn (``pip install 'realvr[diagnostics]'``). No torch.

Features are standardised: for clusters over all samples, for probes over the training folds alone.

* ``ari``: adjusted Rand index of k-means clusters with the labels; k is the number of classes, `STARTS` starts. Its
  bootstrap draws samples with replacement and clusters them again, with one start;
* ``linear``: multinomial logistic regression with an L2 penalty (C = 1);
* ``mlp``: one hidden layer of `HIDDEN` rectified units, Adam with steps of `STEP`, weight decay 1e-3, at most
  `EPOCHS` epochs.

All vectors of one kind are in memory, n x D, with one working copy in float64 for all draws of the bootstrap and a few
for a probe.

Probes are scored by 5-fold cross-validation: every sample is predicted once, by a probe that has not seen it. Folds are
stratified by class; where samples share a picture, all of one picture are in one fold.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.diagnostics.numbers import rate
from realvr.diagnostics.states import Rows
from realvr.errors import require
from realvr.evaluation.statistics import interval

FOLDS, STARTS, HIDDEN, EPOCHS, STEP = 5, 10, 64, 100, 0.005
Labels = NDArray[Any]
_CHUNK = 64


def standardise(rows_ND: NDArray[np.float64]) -> None:
    """Mean 0 and deviation 1 of every column, in place; a constant column is only centred."""
    count, mean_D = len(rows_ND), rows_ND.mean(0)
    rows_ND -= mean_D
    variance_D = np.einsum("nd,nd->d", rows_ND, rows_ND) / count
    rounding_D = (count * np.finfo(np.float64).eps * mean_D) ** 2
    rows_ND /= np.sqrt(np.where(variance_D > rounding_D, variance_D, 1.0))


def check() -> None:
    """Refuse early where scikit-learn is missing."""
    require(["sklearn"], "diagnostics", "diagnostic task-structure")


@dataclass(frozen=True)
class Probed:
    """Vectors (n, D) with a class each; ``groups`` names the picture of each sample."""

    rows: Rows
    labels: Labels
    groups: Sequence[str]
    seed: int = 0

    def ari(self) -> float:
        """Adjusted Rand index of k-means clusters with the labels."""
        return self._ari(np.arange(len(self.labels)), STARTS, self.seed, np.empty(self.rows.shape))

    def bootstrap(self, draws: int) -> dict[str, Any]:
        """Mean and interval of the index over draws of samples, each clustered again; a `Mean` with n samples."""
        rng, space = np.random.default_rng([self.seed, 2]), np.empty(self.rows.shape)
        count = len(self.labels)
        found = np.array([self._ari(rng.integers(0, count, count), 1, draw, space) for draw in range(draws)])
        low, high = interval(found)
        return {"mean": float(found.mean()), "low": low, "high": high, "pairs": count}

    def _ari(self, chosen: NDArray[np.intp], starts: int, seed: int, space: NDArray[np.float64]) -> float:
        """Of the chosen samples; ``space`` (n, D) is written over, so that a draw takes no memory of its own."""
        from sklearn.cluster import KMeans
        from sklearn.metrics import adjusted_rand_score

        for start in range(0, len(chosen), _CHUNK):
            space[start : start + _CHUNK] = self.rows[chosen[start : start + _CHUNK]]
        standardise(space)
        classes = len(np.unique(self.labels))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fewer distinct points than clusters: equal states are no mistake
            clustering = KMeans(min(classes, len(space)), n_init=starts, random_state=seed, copy_x=False)
            clusters = clustering.fit_predict(space)
        return float(adjusted_rand_score(self.labels[chosen], clusters))

    def linear(self) -> dict[str, Any]:
        """Accuracy of the linear probe over held-out samples."""
        from sklearn.linear_model import LogisticRegression

        return self._accuracy(LogisticRegression(C=1.0, max_iter=500))

    def mlp(self) -> dict[str, Any]:
        """Accuracy of the MLP probe over held-out samples."""
        from sklearn.neural_network import MLPClassifier

        probe = MLPClassifier((HIDDEN,), alpha=1e-3, max_iter=EPOCHS, learning_rate_init=STEP, random_state=self.seed)
        return self._accuracy(probe)

    def _accuracy(self, probe: Any) -> dict[str, Any]:  # noqa: ANN401  # scikit-learn's
        from sklearn.base import clone
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rows, right = self.rows.astype(np.float64), 0
        for train, test in self._folds():
            if len(np.unique(self.labels[train])) < 2:  # whole classes on one picture
                right += int((self.labels[test] == self.labels[train][0]).sum())
                continue
            fitted = make_pipeline(StandardScaler(), clone(probe))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a probe that stops at its limit is still a probe
                fitted.fit(rows[train], self.labels[train])
            right += int((fitted.predict(rows[test]) == self.labels[test]).sum())
        return rate(right, len(rows))

    def _folds(self) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        kind = StratifiedGroupKFold if self.grouped else StratifiedKFold
        split = kind(FOLDS, shuffle=True, random_state=self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class on fewer pictures than folds
            return list(split.split(self.rows, self.labels, list(self.groups) if self.grouped else None))

    @property
    def grouped(self) -> bool:
        """Whether samples share pictures."""
        return len(set(self.groups)) < len(self.groups)

    def shuffled(self) -> Probed:
        """The same vectors with the labels dealt out at random: what chance gives."""
        labels = np.random.default_rng([self.seed, 3]).permutation(self.labels)
        return Probed(self.rows, labels, self.groups, self.seed)
