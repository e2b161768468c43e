//! HTTP/1.1 heads and framing, without I/O. Source: RFC 9110, RFC 9112.
