{{/* A table as TOML: its values first, then its tables. Helm reads the integers of YAML as floating point. */}}
{{- define "downbeat.toml" -}}
{{- range $key, $value := . -}}
{{- if and (not (kindIs "map" $value)) (not (kindIs "invalid" $value)) -}}
{{ include "downbeat.tomlKey" $key }} = {{ include "downbeat.tomlValue" $value }}
{{ end -}}
{{- end -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value }}
[{{ include "downbeat.tomlKey" $key }}]
{{ range $inner, $of := $value -}}
{{- if not (kindIs "invalid" $of) -}}
{{ include "downbeat.tomlKey" $inner }} = {{ include "downbeat.tomlValue" $of }}
{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "downbeat.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ toRawJson . }}{{- end -}}
{{- end -}}

{{- define "downbeat.tomlValue" -}}
{{- if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $pair := printf "%s = %s" (include "downbeat.tomlKey" $key) (include "downbeat.tomlValue" $value) -}}
{{- $pairs = append $pairs $pair -}}
{{- end -}}
{{- end -}}
{ {{ join ", " $pairs }} }
{{- else if kindIs "slice" . -}}
{{- $values := list -}}
{{- range . -}}{{- $values = include "downbeat.tomlValue" . | append $values -}}{{- end -}}
[{{ join ", " $values }}]
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%.0f" . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- else -}}
{{ toRawJson . }}
{{- end -}}
{{- end -}}
