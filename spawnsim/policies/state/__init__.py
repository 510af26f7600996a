"""A model and its optimizer as named tensors and as bytes: layout, arithmetic, codecs, snapshots. No communicator."""
