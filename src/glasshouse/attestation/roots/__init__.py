"""The pure half of each root of trust, which appraises what `runtime.roots` collected; `root_table` lists them."""
