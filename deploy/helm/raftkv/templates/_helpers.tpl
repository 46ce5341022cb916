{{- /* Short enough for what is put behind it: -peers, and the number of a pod. */}}
{{- define "raftkv.name" -}}
{{- $name := ternary .Release.Name (printf "%s-raftkv" .Release.Name) (contains "raftkv" .Release.Name) }}
{{- $name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "raftkv.selector" -}}
app.kubernetes.io/name: raftkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: member
{{- end }}

{{- define "raftkv.labels" -}}
app.kubernetes.io/name: raftkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "raftkv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "raftkv.scheme" -}}
{{ if .Values.tls.enabled }}https{{ else }}http{{ end }}
{{- end }}

{{- /* The domain below which each pod has a name, its own before it. */}}
{{- define "raftkv.domain" -}}
{{ include "raftkv.name" . }}-peers.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "raftkv.initialCluster" -}}
{{- $pairs := list }}
{{- range $ordinal := until (int .Values.founders) }}
{{- $pod := printf "%s-%d" (include "raftkv.name" $) $ordinal }}
{{- $pairs = append $pairs (printf "%s=%s://%s.%s:2380" $pod (include "raftkv.scheme" $) $pod (include "raftkv.domain" $)) }}
{{- end }}
{{- join "," $pairs }}
{{- end }}

{{- define "raftkv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "raftkv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
