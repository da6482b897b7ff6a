"""State machines: an immutable state and one `step(state, event, now)` that returns the state and effects.

Events are past tense, effects imperative. Keys, nonces and measurements come in inside events. The shell in
`node.market` persists state and outbox in one transaction before it carries an effect out.
"""
