"""Predictions: what an iteration of each strategy would take on a described cluster."""

from __future__ import annotations

from wingbeat.prediction.cluster import Cluster
from wingbeat.prediction.predict import Prediction, Ranking, predict, rank

__all__ = ["Cluster", "Prediction", "Ranking", "predict", "rank"]
