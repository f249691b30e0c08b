"""Benchmarks: ours and the peers, side by side, each in a process of its own.

The parent: `asking` and `configurations` (what the options say), `steps`, `largest`, `quality`, `host_updates` and
`probing` (a command each). They start one worker after the other by `process`, which watches it from outside
(`watching`) and ends it when it hangs, show what happens (`screen`), and leave `results`: `facts` of the machine,
`rows` of figures, a `chart`.
A `worker`: reads `jobs`, builds a model (`models`), hands it to an engine (`engines`, and `peers` for those of others),
times its steps (`timing`) and what passed in a traced one (`passing`), looks for sizes (`searching`) or rates
(`measuring`), lets a small model learn (`learning`) or the host's cores update (`updating`), and writes events.

- engine: one way to train: overspill itself, plain torch, a peer.
- row: what became of one engine: its figures, or the reason why there are none.

Nothing here is imported by `import overspill`. GB is 10^9 bytes.
May import: api (through the package), cli, report, layer 0, and `tiers` and `kernels` to measure rates.
"""
