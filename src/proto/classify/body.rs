//! Finds `model` and `stream` at the top level of a JSON body, lazily.
