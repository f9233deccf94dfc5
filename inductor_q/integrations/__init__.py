"""What makes other libraries' ways of training fit into one graph: called by name, never unasked.

These functions change the model that they are given and nothing else: no class, no configuration.
"""

from inductor_q.integrations.checkpointing import prepare_checkpointing

__all__ = ["prepare_checkpointing"]
