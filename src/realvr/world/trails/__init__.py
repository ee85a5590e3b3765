"""Trails: boards of arrows that one follows from a start to a circle. Looking takes as many steps as there are arrows,
and the evidence is an ordered list of cells."""

from realvr.world.trails.board import follow as follow
