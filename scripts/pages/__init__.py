"""The sources of generated pages, and what draws, writes or publishes them.

`scripts/write_docs.py` reads `costs_table`, `metrics_table` and `replay_table`. `adapter_methods`
and `architectures` try every method and every type, and write the page of what they found. `plots`
draws the records, `wandb_panels` makes a workspace of the metrics, and `site_pages` is a hook of
`mkdocs.yml`.
"""
