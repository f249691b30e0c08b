"""Benchmarks: ours and the peers, side by side, each in a process of its own.

The parent (`steps`, `largest`, `probing`) decides what is run, starts one `worker` process after the other by
`process`, which watches what it takes from outside (`watching`) and ends it when it hangs, shows what happens
(`screen`), and gathers `facts`, `results` and a `chart`. A worker reads a `jobs.Job`, builds a model (`models`), hands
it to an engine (`engines`; `peers` holds those of others), times its steps (`timing`), and writes events.

- engine: one way to train: overspill itself, plain torch, a peer.
- row: what became of one engine: its figures, or the reason why there are none.

Nothing here is imported by `import overspill`. GB is 10^9 bytes.
May import: api (through the package), cli, report, layer 0, and `tiers` to measure rates.
"""
