"""The NCCL carrier: blocks are gathered into slots of a ring, sent slot by slot, and scattered from the receiver's."""
