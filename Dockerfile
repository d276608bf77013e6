# syntax=docker/dockerfile:1
# Build: docker build -t weir .
# Run:   docker run -p 8080:8080 -v "$PWD/conf:/etc/weir:ro" weir

FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY Cargo.toml Cargo.lock ./
COPY .cargo .cargo
COPY vendor vendor
COPY src src
COPY benches benches
COPY tests tests
RUN cargo build --release --locked --bin weir \
    && cp target/release/weir /weir \
    && strip --strip-debug /weir

# bookworm: the C library the binary was linked against above.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 65532 --no-create-home --shell /usr/sbin/nologin weir
COPY --from=build /weir /usr/local/bin/weir
COPY LICENSE /usr/share/doc/weir/LICENSE
COPY conf/weir.yaml /etc/weir/weir.yaml
USER 65532:65532
EXPOSE 8080 9090
# In good order: not ready at once, running streams are finished.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["curl", "--fail", "--silent", "--output", "/dev/null", "http://127.0.0.1:8080/health"]
ENTRYPOINT ["weir"]
CMD ["--config", "/etc/weir/weir.yaml"]
