"""Providers of rented machines: offers, a machine, its way back."""
