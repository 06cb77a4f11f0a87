"""Forwards of real model shapes summarised and modelled: terms, fit, held-out check, tables, answers."""
