"""AutoPipe's measurements: units, links, static layouts."""
