"""dstack on TDX: a quote, and the events that the measured launcher wrote before it handed over."""
